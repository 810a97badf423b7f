"""The rooms of the package: who may import whom, and how large a file may be."""

import ast
import importlib
import warnings
from pathlib import Path

import pytest

import aipod

ROOT = Path(aipod.__file__).parent

# From the ground up, as the documents list them: a room imports rooms above it in this list alone.
ROOMS = [
    "_misc",
    "sets",
    "problem",
    "stepsize",
    "slots",
    "_hypergradient",
    "algorithms",
    "baselines",
    "solving",
    "callbacks",
    "diagnose",
    "federated",
    "data",
    "runs",
    "flower",
    "experiments",
    "_report",
    "cli",
]
# Inside `slots`, from the ground up.
SLOTS = ["", "lower", "adjoint", "upper"]
FILES = sorted(ROOT.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> set[str]:
    """The modules of aipod that a file imports, at its top or inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "aipod":
            # `from aipod import data` names a room, `from aipod.sets import Free` a name in one.
            names = [f"{node.module}.{name.name}" for name in node.names]
            found |= set(names) if node.module == "aipod" else {node.module}
        elif isinstance(node, ast.Import):
            found |= {n.name for n in node.names if n.name.split(".")[0] == "aipod"}
    return found


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


@pytest.mark.parametrize(
    "path", [f for f in FILES if len(f.relative_to(ROOT).parts) > 1], ids=relative
)
def test_imports_point_up_the_list_of_rooms(path):
    own = path.relative_to(ROOT).parts[0]
    level = ROOMS.index(own)
    for module in imported(path):
        room = room_of(module)
        # `import aipod` alone is for the rooms that use the library as its users do.
        assert room or own in ("experiments", "cli"), f"{relative(path)} imports the whole package"
        if room in ROOMS:
            assert ROOMS.index(room) <= level, f"{relative(path)} imports {module}"


@pytest.mark.parametrize(
    "path", [f for f in FILES if f.relative_to(ROOT).parts[0] == "slots"], ids=relative
)
def test_slots_import_only_slots_above_them(path):
    parts = path.relative_to(ROOT).parts
    own = parts[1] if len(parts) > 2 else ""
    for module in imported(path):
        inside = module.split(".")
        if inside[1:2] == ["slots"] and inside[2:3] and inside[2] in SLOTS:
            assert SLOTS.index(inside[2]) <= SLOTS.index(own), f"{relative(path)}: {module}"


def test_every_folder_is_a_room_of_the_list():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    files = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert folders | files == set(ROOMS)
    assert len(list(ROOT.glob("*.py"))) <= 14


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize(
    "name", [name for name in dir(aipod) if callable(getattr(aipod, name)) and name.islower()]
)
def test_no_module_is_hidden_behind_a_function_of_its_name(name):
    """`import aipod.solve as s` would give the function: so there is no such module."""
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"aipod.{name}")


def test_modules_that_are_public_by_their_path():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flower's own imports warn of Click's next version
        for name in ("federated", "flower", "data", "baselines", "stepsize", "experiments"):
            importlib.import_module(f"aipod.{name}")


def test_concrete_classes_never_call_super():
    """A class is abstract or final: only a metaclass and an exception go on with their parents."""
    allowed = {"slots/_spelling.py"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "super":
                continue
            source = path.read_text().splitlines()[node.lineno - 1]
            assert relative(path) in allowed or "super().__init__(" in source, relative(path)
