"""Checkpoints: atomic, without pickle, and tied to the run that made them."""

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.digest import digest_arrays, digest_text
from aipod._misc.files import atomic, remove_leftovers
from aipod._misc.keys import is_key, to_numpy
from aipod.algorithms import Alternating, Keeping, State
from aipod.problem import Bilevel

# Format 2 names the parts of a state by their path; format 1 numbered them.
_VERSION = 2
_KEPT = 2
_STATE, _COLUMN = "state:", "column:"


class CheckpointError(ValueError):
    """A checkpoint that this run must not go on from."""


class Found(NamedTuple):
    """What a checkpoint holds."""

    state: State
    columns: dict[str, np.ndarray]
    extra: dict[str, Any]


def _digest(tree: PyTree) -> str:
    leaves = jax.tree.leaves(eqx.filter(tree, eqx.is_array_like))
    return digest_arrays(("", to_numpy(leaf)) for leaf in leaves)


def fingerprint(
    problem: Bilevel,
    solver: Alternating,
    keeping: Keeping | None,
    state: State,
    key: PRNGKeyArray,
) -> dict[str, str]:
    """What must agree for a run to go on from a checkpoint, part by part.

    The computation is identified by the program that JAX traces for one outer step, with every
    constant in it, so that an edited objective is noticed whatever its name.
    """
    arrays, static = eqx.partition((problem, solver), eqx.is_array)

    def one_step(arrays: PyTree, state: State, key: PRNGKeyArray) -> State:
        problem, solver = eqx.combine(arrays, static)
        return solver.kept_step(keeping, problem, state, key)

    def anywhere(leaf: Any) -> jax.ShapeDtypeStruct:
        # On several devices the program would say so, and a run may go on with fewer of them.
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)

    program = jax.make_jaxpr(one_step)(arrays, jax.tree.map(anywhere, state), key)
    return {
        "problem or solver": digest_text(str(program.jaxpr)),
        "data": _digest((arrays, program.consts)),
        "starting point": _digest((state.x, state.y)),
        "key": _digest(key),
    }


class Checkpoints:
    """A folder with the newest checkpoints of one run, at most two."""

    def __init__(self, folder: str | os.PathLike[str], identity: Mapping[str, str]) -> None:
        self._folder = Path(folder)
        self._identity = dict(identity)
        self._folder.mkdir(parents=True, exist_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("step-*.npz"), reverse=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs out of the folder; the lock ends with the process that holds it."""
        try:
            import fcntl
        except ImportError:  # not a Unix system: no lock, as no two runs should share a folder
            yield
            return
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"another run is writing checkpoints into {self._folder}: wait until it ends, "
                    "or choose another folder."
                ) from None
            except OSError:
                pass  # a file system without locks
            yield
        finally:
            os.close(handle)

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
        named = {_STATE + name: leaf for name, leaf in _named(state).items()}
        named |= {_COLUMN + name: np.asarray(value) for name, value in columns.items()}
        header = {
            "version": _VERSION,
            "identity": self._identity,
            "jax": jax.__version__,
            "step": step,
            "extra": dict(extra),
            # NumPy's files know its own types alone: others, such as bfloat16, are kept as bits.
            "types": {n: v.dtype.name for n, v in named.items() if v.dtype.kind == "V"},
        }
        arrays = {name: _bits(value) for name, value in named.items()}
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with atomic(self._folder / f"step-{step:012d}.npz") as file:
            np.savez(file, allow_pickle=False, **arrays)
        for old in self._files()[_KEPT:]:
            old.unlink(missing_ok=True)
        remove_leftovers(self._folder, "step-*.npz")

    def load(self, like: State) -> Found | None:
        """The newest whole checkpoint in the structure of `like`; None when there is none.

        A damaged one is passed over for the one before it.
        """
        for path in self._files():
            content = _read(path)
            if content is None:
                continue
            header = content.pop("header")
            self._check(path, header)
            with contextlib.suppress(_Damaged):
                return _restored(content, header, like)
        return None

    def load_or_refuse(self, like: State) -> Found | None:
        """The same, but raises where there are checkpoints and all of them are damaged."""
        found = self.load(like)
        if found is None and self._files():
            raise CheckpointError(
                f"every checkpoint in {self._folder} is damaged: remove them to start anew, or "
                "choose another folder."
            )
        return found

    def _check(self, path: Path, header: dict[str, Any]) -> None:
        """Raises unless the checkpoint belongs to this run."""
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


class _Damaged(Exception):
    """A checkpoint whose parts do not fit together."""


def _named(state: State) -> dict[str, np.ndarray]:
    """The leaves of a state by their path, such as `.lower.correction['w']`."""
    return {
        jax.tree_util.keystr(path): to_numpy(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def _read(path: Path) -> dict[str, Any] | None:
    """All of a checkpoint, its header parsed; None when it is damaged (it has checksums)."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            content: dict[str, Any] = {name: archive[name] for name in archive.files}
        header = json.loads(content["header"].tobytes().decode())
        whole = isinstance(header["identity"], dict) and isinstance(header["extra"], dict)
        content["header"] = header | {"types": header.get("types", {})}
        return content if whole and {"version", "jax", "step"} <= set(header) else None
    except (
        *(OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, NotImplementedError),
        *(RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error),
    ):
        return None


def _restored(content: dict[str, Any], header: dict[str, Any], like: State) -> Found:
    types = header["types"]
    arrays = {
        name: value.view(jnp.dtype(types[name])) if name in types else value
        for name, value in content.items()
    }
    restored = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(like):
        array = arrays.get(_STATE + jax.tree_util.keystr(path))
        old = to_numpy(leaf)
        if array is None or array.shape != old.shape or array.dtype != old.dtype:
            raise _Damaged
        restored.append(_to_device(array, leaf))
    columns = {
        name.removeprefix(_COLUMN): value
        for name, value in arrays.items()
        if name.startswith(_COLUMN)
    }
    state = jax.tree.unflatten(jax.tree.structure(like), restored)
    return Found(state, columns, header["extra"])


def _to_device(array: np.ndarray, like: Array) -> Array:
    if is_key(like):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
    return jnp.asarray(array, like.dtype)
