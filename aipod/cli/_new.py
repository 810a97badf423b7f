"""`aipod new`."""

from importlib import resources
from pathlib import Path

from rich.markup import escape

from aipod._misc.files import write_text
from aipod.cli._show import err, out


def new(name: Path, *, force: bool) -> int:
    """Writes a task file that runs as it is, and prints the lines to go on with."""
    path = name if name.suffix == ".py" else name.with_name(f"{name.name}.py")
    if not path.stem.isidentifier():
        raise ValueError(f"{path.name} is no name for a Python file: use letters, digits and _.")
    if path.exists() and not force:
        raise ValueError(f"{path} is there already: choose another name, or add --force.")
    text = resources.files("aipod.experiments").joinpath("template.py").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.replace("NAME.py", str(path)))
    err.print(f"{escape(str(path))} runs as it is; change it into your problem. Try:")
    for line in (
        f"aipod run {path}:task",
        f"aipod compare {path}:task --solvers aipod,e-aipod,e3-aipod --seeds 3",
        "aipod report runs",
    ):
        out.print(line, soft_wrap=True, highlight=False, markup=False)
    return 0
