"""A solution as a file, and back: x, y, history and ledger. No pickle."""

import dataclasses
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from aipod._misc.files import atomic
from aipod._misc.functions import keep, release
from aipod._misc.keys import to_numpy
from aipod.solving._convergence import Convergence
from aipod.solving._history import History
from aipod.solving._ledger import Ledger
from aipod.solving._plot import Shown
from aipod.solving._result import Result

_VERSION = 1
_COLUMN = "column:"
_LEAF = "leaf"  # in the described structure, where an array belongs


@dataclasses.dataclass(frozen=True)
class SavedSolution(Shown):
    """A solution that was read from a file; it prints, plots and reports like the solution itself.

    Its fields are those of `Solution`.

    - `text`: what `print(solution)` printed.

    !!! example
        ```python
        solution.save("solution.npz")
        again: aipod.SavedSolution = aipod.load("solution.npz")
        ```
    """

    x: PyTree = dataclasses.field(repr=False)
    y: PyTree = dataclasses.field(repr=False)
    result: Result
    message: str
    history: History
    ledger: Ledger
    seconds: np.ndarray = dataclasses.field(repr=False)
    convergence: Convergence = dataclasses.field(repr=False)
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes it again."""
        return save(path, self)


def save(path: str | os.PathLike[str], solution: Any) -> Path:
    """Writes a solution, the whole file or nothing of it."""
    path = Path(path)
    path = path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")
    x, y = keep(solution.x), keep(solution.y)
    arrays = _named("x", x) | _named("y", y) | {"seconds": solution.seconds}
    arrays |= {_COLUMN + name: np.asarray(column) for name, column in solution.history.items()}
    header = {
        "version": _VERSION,
        "x": _described(x),
        "y": _described(y),
        "result": solution.result.name,
        "message": solution.message,
        "ledger": dataclasses.asdict(solution.ledger),
        "convergence": dataclasses.asdict(solution.convergence),
        "text": str(solution),
        # NumPy's files know its own types alone: others, such as bfloat16, are kept as bits.
        "types": {n: v.dtype.name for n, v in arrays.items() if v.dtype.kind == "V"},
    }
    bits = {n: v.view(f"u{v.dtype.itemsize}") for n, v in arrays.items() if n in header["types"]}
    written = arrays | bits
    written["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with atomic(path) as file:
        np.savez(file, allow_pickle=False, **written)
    return path


def load(
    path: str | os.PathLike[str], x0: PyTree | None = None, y0: PyTree | None = None
) -> SavedSolution:
    """Reads what `solution.save(path)` wrote.

    **Arguments:**

    - `path`: the file.
    - `x0`, `y0`: points with the structure of x and y. Arrays, dictionaries, lists and tuples need
        none. Anything else, such as an Equinox module, is else a dictionary from places to arrays.

    !!! example
        ```python
        solution.save("solution.npz")
        again = aipod.load("solution.npz")
        again.x, again.history["step"], again.ledger.projections
        ```
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(arrays.pop("header").tobytes().decode())
        if header["version"] != _VERSION:
            raise ValueError(f"its format is {header['version']}, and this aipod reads {_VERSION}")
        for name, kind in header["types"].items():
            arrays[name] = arrays[name].view(jnp.dtype(kind))
        columns = {k.removeprefix(_COLUMN): v for k, v in arrays.items() if k.startswith(_COLUMN)}
        return SavedSolution(
            x=_restored("x", header["x"], arrays, x0),
            y=_restored("y", header["y"], arrays, y0),
            result=Result[header["result"]],
            message=header["message"],
            history=History(columns),
            ledger=Ledger(**header["ledger"]),
            seconds=arrays["seconds"],
            convergence=Convergence(**header["convergence"]),
            text=header["text"],
        )
    except FileNotFoundError:
        raise ValueError(f"there is no file {os.fspath(path)}: solution.save writes one.") from None
    except (
        *(OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError),
        *(zipfile.BadZipFile, zlib.error),
    ) as error:
        raise ValueError(f"{os.fspath(path)} is no saved solution ({error}).") from None


def _named(letter: str, tree: PyTree) -> dict[str, np.ndarray]:
    """The leaves by their place, such as `x['w'][0]`."""
    return {
        letter + jax.tree_util.keystr(place): to_numpy(leaf)
        for place, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _described(tree: PyTree) -> Any:
    """The structure of dictionaries, lists and tuples as JSON; None for anything else."""
    if tree is None:
        return {"none": True}
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        parts: Any = {key: _described(value) for key, value in tree.items()}
        return None if None in parts.values() else {"dict": parts}
    if type(tree) in (list, tuple):
        parts = [_described(value) for value in tree]
        return None if None in parts else {type(tree).__name__: parts}
    return _LEAF if jax.tree_util.all_leaves([tree]) else None


def _restored(letter: str, described: Any, arrays: Mapping[str, np.ndarray], like: PyTree) -> Any:
    own = {name[1:]: value for name, value in arrays.items() if name[:2] in _begins(letter)}
    if like is not None:
        named, structure = jax.tree_util.tree_flatten_with_path(keep(like))
        wanted = {jax.tree_util.keystr(place): np.shape(leaf) for place, leaf in named}
        if wanted != {name: value.shape for name, value in own.items()}:
            raise ValueError(f"{letter}0 has {wanted}, which is not what {letter} had")
        return release(jax.tree.unflatten(structure, [jnp.asarray(own[n]) for n in wanted]))
    if described is None:
        return {name: jnp.asarray(value) for name, value in own.items()}
    return _built(described, "", own)


def _begins(letter: str) -> tuple[str, ...]:
    return letter, f"{letter}[", f"{letter}."


def _built(described: Any, place: str, own: Mapping[str, np.ndarray]) -> Any:
    if described == _LEAF:
        return jnp.asarray(own[place])
    ((kind, parts),) = described.items()
    if kind == "none":
        return None
    if kind == "dict":
        return {key: _built(part, f"{place}[{key!r}]", own) for key, part in parts.items()}
    built = [_built(part, f"{place}[{index}]", own) for index, part in enumerate(parts)]
    return tuple(built) if kind == "tuple" else built
