"""The model of a run as a file, and back."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from aipod._misc.files import atomic
from aipod.runs._folder import RunFolder
from aipod.solving import History

_STATE, _HISTORY = "state:.", "column:history:"


@dataclasses.dataclass(frozen=True)
class Model:
    """What a run has found.

    - `x`, `y`: in the structure that was asked for, without a client axis.
    - `history`: the recorded columns; empty for a model file, which has none.

    !!! example
        ```python
        model = aipod.flower.Model(jnp.zeros(3), jnp.zeros(2), aipod.History({}))
        ```
    """

    x: PyTree
    y: PyTree
    history: History


def write_model(path: Path, x: PyTree, y: PyTree) -> None:
    """Writes x and y, which have a client axis of length 1, as arrays named by their place."""
    arrays = {
        letter + jax.tree_util.keystr(place): np.asarray(leaf[0])
        for letter, tree in (("x", x), ("y", y))
        for place, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    with atomic(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def load(path: str | os.PathLike[str], x0: PyTree = None, y0: PyTree = None) -> Model:
    """The model of a run on Flower, from its run folder, its checkpoints or its model file.

    **Arguments:**

    - `path`: a run folder, a folder of checkpoints, or one of the files in them.
    - `x0`, `y0`: points with the structure that x and y get. Without them an x that is one array
        is that array, and any other a dictionary from the places in the tree to arrays.

    !!! example
        ```python
        model = aipod.flower.load("runs/first", x0, y0)
        model.x, model.y, model.history["step"]
        ```
    """
    found = _newest(Path(path))
    try:
        with np.load(found, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{found} is no checkpoint and no model ({error}).") from None
    leaves = {n.removeprefix(_STATE): v[0] for n, v in arrays.items() if n[:8] in _OF_STATE}
    leaves = leaves or {n: v for n, v in arrays.items() if n[:1] in ("x", "y")}
    columns = {n.removeprefix(_HISTORY): v for n, v in arrays.items() if n.startswith(_HISTORY)}
    return Model(
        x=_shaped(leaves, "x", x0, found),
        y=_shaped(leaves, "y", y0, found),
        history=History(columns),
    )


_OF_STATE = (f"{_STATE}x", f"{_STATE}y")


def _newest(path: Path) -> Path:
    if path.is_file():
        return path
    folder = RunFolder(path)
    places = [path, folder.checkpoint]
    files = [file for place in places for file in sorted(place.glob("step-*.npz"), reverse=True)]
    files += [folder.model] if folder.model.is_file() else []
    if not files:
        raise ValueError(
            f"{path} holds neither checkpoints nor a model: give the run folder of a server, its "
            "checkpoint folder, or a file in there."
        )
    return files[0]


def _shaped(leaves: Mapping[str, np.ndarray], letter: str, like: PyTree, file: Path) -> Any:
    own = {name[1:]: value for name, value in leaves.items() if name[:1] == letter}
    if not own:
        raise ValueError(f"{file} holds no {letter}: it is none of a server's checkpoints.")
    if like is None:
        return jnp.asarray(own[""]) if set(own) == {""} else jax.tree.map(jnp.asarray, own)
    named, structure = jax.tree_util.tree_flatten_with_path(like)
    wanted = {jax.tree_util.keystr(place): np.shape(leaf) for place, leaf in named}
    if wanted != {name: value.shape for name, value in own.items()}:
        raise ValueError(
            f"{file} holds an {letter} with { ({n: v.shape for n, v in own.items()}) }, and "
            f"{letter}0 has {wanted}: give the starting point of that run."
        )
    return jax.tree.unflatten(structure, [jnp.asarray(own[name]) for name in wanted])
