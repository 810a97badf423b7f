"""Checkpoints: atomic, without pickle, and tied to the run that made them."""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import is_key
from aipod.algorithms._alternating import Alternating, State
from aipod.problem._bilevel import Bilevel

_VERSION = 1
_KEPT = 2
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _to_numpy(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def _from_numpy(array: np.ndarray, like: Array) -> Array:
    if is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    return jnp.asarray(array, like.dtype)


def _digest_arrays(tree: PyTree) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array_like)):
        array = _to_numpy(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


def fingerprint(
    problem: Bilevel, solver: Alternating, state: State, key: PRNGKeyArray
) -> dict[str, str]:
    """What must agree for a run to go on from a checkpoint, part by part.

    The computation itself is told by the program that JAX traces for one outer step, with every
    constant in it, so that an edited objective is noticed whatever its name.
    """
    arrays, static = eqx.partition((problem, solver), eqx.is_array)

    def one_step(arrays: PyTree, state: State, key: PRNGKeyArray) -> State:
        problem, solver = eqx.combine(arrays, static)
        return solver.traced_step(problem, state, key)

    program = jax.make_jaxpr(one_step)(arrays, state, key)
    text = _ADDRESS.sub("0x", str(program.jaxpr))
    return {
        "problem or solver": hashlib.sha256(text.encode()).hexdigest()[:32],
        "data": _digest_arrays((arrays, program.consts)),
        "starting point": _digest_arrays((state.x, state.y)),
        "key": _digest_arrays(key),
    }


class CheckpointError(ValueError):
    """A checkpoint that this run must not go on from."""


class Checkpoints:
    """A folder with the newest checkpoints of one run, at most two."""

    def __init__(self, folder: str | os.PathLike[str], identity: Mapping[str, str]) -> None:
        self._folder = Path(folder)
        self._identity = dict(identity)
        self._folder.mkdir(parents=True, exist_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("step-*.npz"), reverse=True)

    def refuse_overwriting(self) -> None:
        """Raises unless the folder is free for a new run."""
        if files := self._files():
            raise CheckpointError(
                f"{self._folder} already holds the checkpoint {files[0].name}: pass resume=True to "
                "go on from it, or choose another folder."
            )

    def save(
        self, state: State, columns: Mapping[str, np.ndarray], extra: Mapping[str, Any]
    ) -> None:
        """Writes one checkpoint so that a crash at any moment leaves a whole one behind."""
        step = int(state.step)
        arrays = {f"state:{i:05d}": _to_numpy(v) for i, v in enumerate(jax.tree.leaves(state))}
        arrays |= {f"column:{name}": np.asarray(value) for name, value in columns.items()}
        header = {
            "version": _VERSION,
            "identity": self._identity,
            "jax": jax.__version__,
            "step": step,
            "extra": dict(extra),
        }
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        path = self._folder / f"step-{step:012d}.npz"
        temporary = path.with_suffix(f".tmp{os.getpid()}")
        with open(temporary, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(self._folder)
        for old in self._files()[_KEPT:]:
            old.unlink(missing_ok=True)
        for leftover in self._folder.glob("step-*.tmp*"):
            leftover.unlink(missing_ok=True)

    def load(self, like: State) -> tuple[State, dict[str, np.ndarray], dict[str, Any]] | None:
        """The newest whole checkpoint in the structure of `like`; None when there is none."""
        for path in self._files():
            content = _read(path)
            if content is not None:
                return self._restore(path, content, like)
        return None

    def _restore(
        self, path: Path, content: dict[str, np.ndarray], like: State
    ) -> tuple[State, dict[str, np.ndarray], dict[str, Any]]:
        header = json.loads(content["header"].tobytes().decode())
        if header["version"] != _VERSION:
            raise CheckpointError(
                f"{path} has checkpoint format {header['version']}, but this aipod reads format "
                f"{_VERSION}: resume with the aipod that wrote it, or start anew in another folder."
            )
        differ = [k for k, v in self._identity.items() if header["identity"].get(k) != v]
        if differ:
            versions = (
                ""
                if header["jax"] == jax.__version__
                else (f" (it was written under JAX {header['jax']}, this is {jax.__version__})")
            )
            raise CheckpointError(
                f"{path} was made by another run: another {', '.join(differ)}{versions}. Resume "
                "with what made it, or start anew in another folder."
            )
        leaves, structure = jax.tree.flatten(like)
        restored = [_from_numpy(content[f"state:{i:05d}"], leaf) for i, leaf in enumerate(leaves)]
        columns = {
            name.removeprefix("column:"): value
            for name, value in content.items()
            if name.startswith("column:")
        }
        return jax.tree.unflatten(structure, restored), columns, header["extra"]


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """All of a checkpoint, or None when it is damaged: the archive has checksums."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            content = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return content if "header" in content else None


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the system can open folders."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
