"""Installs the wheel into clean environments and uses it there: `make installs`.

Every environment has one Python, one set of extras, and the oldest or the newest versions that
pyproject.toml allows; constraints.txt plays no part. In each: import, solve, the command, what the
extras are for, and, with all extras, the Flower example on a federation of processes. Where an
extra is missing, the command that the error prints is typed in as it stands.
"""

import argparse
import email
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALL = "experiments,flower,tables,tensorboard"
EXTRAS = ("", "tables", "tensorboard", "experiments", "flower", ALL)
SHOWN = ("jax", "equinox", "lineax", "optax", "numpy", "scipy", "typer", "rich", "flwr")

SOLVE = """
import aipod, jax, jax.numpy as jnp, numpy as np, scipy.sparse
for A in (np.ones((2, 3)), scipy.sparse.csr_array(np.ones((2, 3)))):
    problem = aipod.Bilevel(
        upper=lambda x, y, _: jnp.sum((y - 1) ** 2) + jnp.sum(x**2),
        lower=lambda x, y, _: jnp.sum((y - x) ** 2),
        lower_set=aipod.Affine(A, np.ones(2)),
    )
    for solver in (aipod.EAiPOD(upper_lr=0.1, lower_prob=0.5), aipod.E3AiPOD()):
        solution = aipod.solve(problem, solver, jnp.zeros(3), jnp.zeros(3), 20,
                               key=jax.random.key(0), record=lambda x, y: {"sum": jnp.sum(y)})
        y = solution.feasible()[1]
        if abs(float(jnp.sum(y)) - 1) > 1e-5:
            raise SystemExit(f"infeasible: {y}")
"""
FRAME = f"{SOLVE}\nprint(len(solution.history.to_frame()))"
DIGITS = "import aipod; print(len(aipod.data.digits().train.labels))"
MNIST = "import aipod; aipod.data.mnist()"
FLOWER = "import aipod.flower; print(aipod.flower.Privacy(1.0, 30.0).epsilon(10))"


class Failure(Exception):
    """Something did not work as it should; the text says what."""


class Environment:
    """A folder with an environment in it, and an empty folder to work from."""

    def __init__(self, folder: Path, python: str, wheel: Path, extras: str, versions: str) -> None:
        self.wheel, self.extras = wheel, set(filter(None, extras.split(",")))
        self.bin, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir(parents=True)
        run([python, "-m", "venv", folder / "venv"])
        # pip would do, but takes minutes where uv takes seconds. It has its turn with the hints.
        uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
        if uv is None:
            raise Failure("uv is missing; it comes with the flower extra.")
        into = (uv, "pip", "install", "--quiet", "--python", self.bin / "python")
        if versions == "oldest":
            # Lowest for what is asked for by name, so every requirement is. No sources: releases
            # that are older than this Python would have to be compiled.
            lowest = ("--resolution", "lowest-direct", "--only-binary", ":all:")
            run([*into, *lowest, *requirements(wheel, self.extras)])
        name = f"aipod-jax[{extras}]" if extras else "aipod-jax"
        run([*into, f"{name} @ {wheel.as_uri()}"])

    def __call__(self, command: str, *arguments: str, code: int = 0) -> str:
        """Runs a program of the environment, and returns all that it says."""
        return run([self.bin / command, *arguments], cwd=self.work, code=code)

    def installed(self) -> str:
        said = self("python", "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check")
        found = dict(line.split("==") for line in said.splitlines() if "==" in line)
        return ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)


def run(line: list[str | Path] | str, *, cwd: Path | None = None, code: int = 0) -> str:
    """All that a program or a line of the shell says; raises unless it ends with `code`."""
    shell = isinstance(line, str)
    done = subprocess.run(line, shell=shell, cwd=cwd, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if done.returncode != code:
        named = line if isinstance(line, str) else shlex.join(map(str, line))
        raise Failure(f"`{named}`\nended with {done.returncode}, not {code}:\n{said[-1500:]}")
    return said


def requirements(wheel: Path, extras: set[str]) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        stated = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    split = [requirement.partition("; extra == ") for requirement in stated]
    return [name for name, _, extra in split if not extra or extra.strip("'\"") in extras]


def use(env: Environment) -> None:
    """Everything that should work with the extras of an environment, and what should not."""
    version = env.wheel.name.split("-")[1]
    if env("python", "-c", "import aipod; print(aipod.__version__)").strip() != version:
        raise Failure(f"aipod.__version__ is not {version}.")
    env("python", "-c", SOLVE)
    env("python", str(ROOT / "examples" / "quickstart.py"))
    twenty = ("run", "synthetic", "--steps", "20", "--out")
    # Flower brings typer and rich, so the command is there with either extra.
    if env.extras & {"experiments", "flower"}:
        env("aipod", "--help")
        env("aipod", "list")
    if env.extras == {"flower"}:
        hint(env, "aipod", *twenty, "one")
    if "experiments" in env.extras:
        env("aipod", *twenty, "one")
        env("aipod", "report", "one")
        env(
            "aipod",
            "compare",
            "synthetic",
            "--solvers",
            "aipod,e-aipod",
            "--steps",
            "10",
            "--out",
            "two",
        )
        env("aipod", "check", "synthetic")
        env("python", "-c", DIGITS)
    if "tables" in env.extras:
        env("python", "-c", FRAME)
    if {"tables", "experiments"} <= env.extras and not (env.work / "one/metrics.parquet").is_file():
        raise Failure("no metrics.parquet, though pyarrow is there.")
    if {"tensorboard", "experiments"} <= env.extras:
        env("aipod", *twenty, "three", "--tensorboard")
    if "flower" in env.extras:
        env("python", "-c", FLOWER)


def federate(env: Environment) -> None:
    """The Flower example, as README.md runs it."""
    config = f'outer-steps=2 hidden=20 every=1 run-dir="{env.work / "federated"}"'
    said = env("aipod", "federation", "up", "--nodes", "2", "--tls")
    export = next(line for line in said.splitlines() if line.startswith("export "))
    example = shlex.quote(str(ROOT / "examples" / "flower"))
    line = f"{export} PATH={env.bin}:$PATH; flwr run {example} --stream --run-config '{config}'"
    try:
        run(line, cwd=env.work)
    finally:
        env("aipod", "federation", "down")
    env("aipod", "report", "federated")


def follow(env: Environment) -> None:
    """Types in what the errors recommend, until nothing is missing."""
    five = ("aipod", "run", "synthetic", "--steps", "5", "--out", "hinted", "--force")
    for needs in (
        [("aipod", "list"), ("python", "-c", DIGITS), ("python", "-c", MNIST)],
        [("python", "-c", FRAME)],
        [(*five, "--tensorboard")],
        [("python", "-c", FLOWER), ("aipod", "federation", "up")],
    ):
        hints = {hint(env, *need) for need in needs}
        if len(hints) != 1:
            raise Failure(f"one extra, but several remedies: {hints}")
        run(hints.pop(), cwd=env.work)
        for need in needs:
            # Without the network the images cannot come, but nothing is missing any more.
            if need[-1] not in (MNIST, "up"):
                env(*need)
    env("aipod", "report", "hinted")


def hint(env: Environment, *command: str) -> str:
    """The command that an error recommends."""
    said = env(*command, code=2 if command[0] == "aipod" else 1).strip()
    found = re.search(rf"{re.escape(str(env.bin))}/python\S* -m pip install .*$", said)
    if found is None:
        raise Failure(f"no remedy in the error of {command[:3]}:\n{said[-500:]}")
    return found.group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters")
    parser.add_argument("--versions", nargs="+", default=["newest", "oldest"])
    parser.add_argument("--extras", nargs="+", default=EXTRAS, metavar="EXTRA[,EXTRA...]")
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        build = ["pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, str(ROOT)]
        run([sys.executable, "-m", *build])
        (wheel,) = Path(scratch).glob("*.whl")
        for python in options.python:
            for versions in options.versions:
                for extras in options.extras:
                    folder = Path(scratch) / "environment"
                    began = time.monotonic()
                    title = f"{Path(python).name} {versions} [{extras}]"
                    try:
                        env = Environment(folder, python, wheel, extras, versions)
                        title = f"{env('python', '--version').strip()} {versions} [{extras}]"
                        title += f": {env.installed()}"
                        use(env)
                        if env.extras == set(ALL.split(",")):
                            federate(env)
                        if not env.extras:
                            follow(env)
                        print(f"ok    {title} ({time.monotonic() - began:.0f} s)", flush=True)
                    except Failure as failure:
                        failures += 1
                        print(f"WRONG {title}\n{failure}", flush=True)
                    shutil.rmtree(folder, ignore_errors=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
