"""What to type when an optional package is missing."""

import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

from aipod._misc.version import DISTRIBUTION

# The modules beyond the core dependencies that the source imports, and the extra of each.
EXTRA_OF = {
    "cryptography": "flower",
    "flwr": "flower",
    "httpx": "flower",
    "matplotlib": "experiments",
    "mlflow": "mlflow",
    "pandas": "tables",
    "plotly": "experiments",
    "pooch": "experiments",
    "pyarrow": "tables",
    "rich": "experiments",
    "sklearn": "experiments",
    "starlette": "flower",
    "tensorboardX": "tensorboard",
    "typer": "experiments",
    "uvicorn": "flower",
    "wandb": "wandb",
}


def install(extra: str, *, anew: bool = False) -> str:
    """The command that installs what an extra needs into this environment.

    It names the packages of the extra. `aipod-jax[extra]` would be shorter, but no public index
    has that name, and pip can follow it only where the clone or the wheel is still at hand.

    - `anew`: also what is there already, for packages whose files are incomplete.
    """
    # Double quotes, because Windows shells do not know single ones.
    wanted = " ".join(f'"{requirement}"' for requirement in requirements(extra))
    if not wanted:  # a folder copied by hand, or metadata of an older version
        return f"install {DISTRIBUTION} with its extra {extra} from a clone of the repository"
    if anew:
        wanted = f"--force-reinstall {wanted}"
    python = f'"{sys.executable}"' if " " in sys.executable else sys.executable or "python"
    if importlib.util.find_spec("pip") is None:  # as in the environments that uv makes
        return f"uv pip install --python {python} {wanted}"
    return f"{python} -m pip install {wanted}"


def explain(error: ImportError) -> str | None:
    """What to install for an import that failed; None if no extra brings the module."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(module)
    return f"{module} is not installed; to add it: {install(extra)}" if extra else None


def requirements(extra: str) -> list[str]:
    """The requirements of an extra, as pyproject.toml states them."""
    try:
        declared = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return _from_source(extra)
    parts = [requirement.partition(";") for requirement in declared]
    wanted = re.compile(rf"""\bextra\s*==\s*['"]{extra}['"]""")
    return [name.strip() for name, _, marker in parts if wanted.search(marker)]


def _from_source(extra: str) -> list[str]:
    project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        return []
    declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
    return list(declared.get("optional-dependencies", {}).get(extra, ()))
