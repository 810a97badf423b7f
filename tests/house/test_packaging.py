"""The wheel, what it needs, and what an error tells people to install."""

import ast
import email
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata, util
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from aipod._misc import extras, version

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "aipod"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# By the source, not by its tests.
USED = ("experiments", "flower", "tables", "tensorboard", "wandb", "mlflow")
# Whose module has another name.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "mlflow": "mlflow-skinny"}


def declared(*groups):
    """The names of the distributions that pyproject.toml states; the core without a group."""
    stated = PROJECT["optional-dependencies"]
    lists = [stated[group] for group in groups] if groups else [PROJECT["dependencies"]]
    return {canonicalize_name(Requirement(text).name) for group in lists for text in group}


def modules():
    """Every module of others that the source imports, wherever the import stands."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    # Type checkers bring typing_extensions themselves; nothing else imports it.
    return found - set(sys.stdlib_module_names) - {"aipod", "typing_extensions"}


def distribution(module):
    return canonicalize_name(DISTRIBUTIONS.get(module, module))


def test_everything_that_is_imported_is_declared_and_nothing_else():
    optional = {module for module in modules() if distribution(module) not in declared()}
    assert optional == set(extras.EXTRA_OF)
    assert {distribution(module) for module in modules() - optional} == declared()
    for extra in USED:
        brought = {distribution(m) for m, name in extras.EXTRA_OF.items() if name == extra}
        assert brought == declared(extra)


def test_the_library_needs_no_extra():
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(extras.EXTRA_OF)!r}))\n"
        "import aipod, aipod.experiments.execute, aipod.runs._environment\n"
        "[getattr(aipod, name) for name in dir(aipod)]\n"
        "print(aipod.runs._environment.environment()['aipod'] == aipod.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr


def test_constraints_pin_what_is_declared_within_its_bounds():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    pinned = {canonicalize_name(name): pin for name, pin in pins}
    assert len(pinned) == len(pins)
    stated = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in stated for text in group):
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_the_version_is_stated_once():
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited.group(1) == PROJECT["version"]


def test_a_source_tree_that_is_not_installed_has_no_version(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert runpy.run_path(version.__file__)["__version__"] == "0+unknown"


def test_nothing_recommends_the_distribution_of_others():
    texts = [*PACKAGE.rglob("*.py"), *ROOT.glob("*.md"), ROOT / "Makefile"]
    texts += [p for d in ("docs", "examples") for p in (ROOT / d).rglob("*") if p.is_file()]
    # `aipod[flower]` and `pip install aipod`; `import aipod[0]` is nobody's code.
    wrong = re.compile(r"(?<![-\w.])aipod\[[a-z]|pip install\s+(-\S+\s+)*['\"]?aipod(?!-jax)\b")
    found = [p for p in texts if wrong.search(p.read_text(encoding="utf-8", errors="replace"))]
    assert found == []
    assert wrong.search("pip install 'aipod[flower]'")
    assert wrong.search("pip install -q aipod")
    assert not wrong.search("pip install 'aipod-jax[flower] @ file:///a.whl'")


def test_the_workflow_tests_the_pythons_that_are_promised():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the docs extra")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    (job,) = workflow["jobs"].values()
    promised = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if " :: 3." in c]
    assert job["strategy"]["matrix"]["python"] == promised
    assert workflow["permissions"] == {"contents": "read"}
    assert "schedule" in workflow[True]  # YAML reads the key `on` as a truth value
    assert any("make test" in step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize("extra", USED)
def test_the_remedy_is_the_same_without_metadata(extra, monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    stated = PROJECT["optional-dependencies"][extra]
    assert shlex.split(extras.install(extra)) == [sys.executable, "-m", "pip", "install", *stated]
    # A copy of the package alone: there is nothing to read, and nothing to guess.
    monkeypatch.setattr(extras, "__file__", "/nowhere/aipod/_misc/extras.py")
    assert "pip" not in extras.install(extra)
    assert "clone" in extras.install(extra)


def test_the_remedy_fits_the_environment(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/my tools/python")
    assert shlex.split(extras.install("flower"))[:2] == ["/my tools/python", "-m"]
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    expected = ["uv", "pip", "install", "--python", "/my tools/python"]
    assert shlex.split(extras.install("flower"))[:5] == expected


def test_only_what_an_extra_brings_is_explained():
    told = extras.explain(ModuleNotFoundError("", name="plotly.offline"))
    assert told is not None
    assert told.endswith(extras.install("experiments"))
    assert extras.explain(ModuleNotFoundError("", name="my_module")) is None
    assert extras.explain(ImportError("no name")) is None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if util.find_spec("hatchling") is None:
        pytest.skip("building the wheel needs hatchling, which comes with the dev extra")
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    pip(*build, str(ROOT))
    (path,) = folder.glob("*.whl")
    return path


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"aipod_jax-{PROJECT['version']}.dist-info/"
    packed = {name for name in names if not name.startswith(info)}
    files = [p for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    # The command may begin outside the package, which takes long to import.
    files += [p for p in [ROOT / f"{PROJECT['scripts']['aipod'].split(':')[0]}.py"] if p.is_file()]
    assert packed == {path.relative_to(ROOT).as_posix() for path in files}
    assert {"aipod/py.typed", "aipod/_report/page.css"} < packed
    for folder in ("facts", "published"):
        assert any(re.search(rf"/{folder}/\w+\.csv$", name) for name in packed)
    assert f"{info}licenses/LICENSE" in names


def test_the_metadata_say_what_pyproject_says(wheel):
    found = stated(wheel)
    assert found["Name"] == version.DISTRIBUTION == "aipod-jax"
    assert found["Version"] == PROJECT["version"]
    assert set(found.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert found["Requires-Python"] == ">=3.11"


def stated(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin folder of a fresh environment with the wheel, and the packages of this one."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    create = [sys.executable, "-m", "venv", "--without-pip", str(venv)]
    subprocess.run(create, check=True, capture_output=True)
    (site,) = venv.glob("lib/python*/site-packages")
    here = str(Path(util.find_spec("jax").origin).parents[1])
    # A path alone: .pth files over there, such as that of an editable aipod, are not read.
    (site / "borrowed.pth").write_text(f"{here}\n")
    python = str(venv / "bin" / "python")
    pip("--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", str(wheel))
    return venv / "bin"


def run(command, cwd):
    # Without the source tree, which tests may have on their path.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "AIPOD_DATA")
    }
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_brings_the_command(installed, tmp_path):
    done = run([installed / "aipod", "list"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "synthetic" in done.stdout


PROVOKE = """
import contextlib, io, json, sys, pathlib
import aipod, aipod.cli
from aipod.experiments.tensorboard import require_tensorboard

def command():
    with contextlib.redirect_stderr(io.StringIO()) as said:
        aipod.cli.main(["list"])
    raise ValueError(said.getvalue().strip())

def flower():
    import aipod.flower

def federation():
    from aipod.cli._federation import up
    up(pathlib.Path("f"), nodes=1, tls=False)

def beside():
    from aipod.flower._process import beside_python
    beside_python("flower-nothing")

def told(act):
    try:
        act()
    except (ImportError, ValueError) as error:
        return str(error)
    return "nothing went wrong"

found = {"flower": [], "experiments": [], "tables": [], "tensorboard": []}
found["flower"] += [told(beside)]
for name in [n for n in sys.modules if n.startswith("aipod.flower") or n.startswith("flwr")]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(["cryptography", "flwr"]))
found["flower"] += [told(flower), told(federation)]
sys.modules.update(dict.fromkeys(["matplotlib", "pandas", "pooch", "rich", "sklearn"]))
sys.modules.update(dict.fromkeys(["tensorboardX", "typer"]))
sys.modules.pop("aipod.cli._app", None)
found["tables"] += [told(aipod.History({}).to_frame)]
found["tensorboard"] += [told(require_tensorboard)]
found["experiments"] += [told(command), told(aipod.data.digits), told(aipod.data.mnist)]
print(json.dumps([aipod.__version__, aipod.__file__, found]))
"""


def test_every_error_about_an_extra_ends_with_a_command_that_installs_it(
    wheel, installed, tmp_path
):
    pytest.importorskip("flwr")
    done = run([installed / "python", "-c", PROVOKE], tmp_path)
    assert done.returncode == 0, done.stderr
    found, place, told = json.loads(done.stdout)
    assert found == PROJECT["version"]
    assert Path(place).is_relative_to(installed.parent)
    requirements = [Requirement(text) for text in stated(wheel).get_all("Requires-Dist")]
    assert sum(map(len, told.values())) == 8
    for extra, messages in told.items():
        for message in messages:
            _, python, command = message.partition(f"{installed / 'python'}")
            assert python, message
            assert shlex.split(command)[:3] == ["-m", "pip", "install"]
            options = ["--force-reinstall"] if "there is no" in message else []
            assert shlex.split(command)[3 : 3 + len(options)] == options
            typed = [Requirement(text) for text in shlex.split(command)[3 + len(options) :]]
            wanted = [r for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
            assert {(r.name, r.specifier) for r in typed} == {(r.name, r.specifier) for r in wanted}
