"""What of a client's state all clients share, and what is its own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from aipod.algorithms import Alternating, PackedWatch, State
from aipod.flower._draws import own_draws
from aipod.flower._short import first_rows, marked, with_known


def _own(solver: Alternating, state: State) -> State:
    """For each leaf whether it is a client's own."""
    mask = own_draws(solver.own(state))
    return mask if solver.wire is None else marked(mask)


def shared_leaves(solver: Alternating, state: State) -> dict[str, np.ndarray]:
    """What another client needs to go on from the same place, by the number of the leaf."""
    owned = jax.tree.leaves(_own(solver, state))
    leaves = jax.tree.leaves(state)
    return {
        str(i): np.asarray(leaf)
        for i, (leaf, own) in enumerate(zip(leaves, owned, strict=True))
        if not own
    }


def with_shared(solver: Alternating, state: State, shared: Mapping[str, np.ndarray]) -> State:
    """The state with its shared part replaced; `ValueError` when it does not fit."""
    leaves, structure = jax.tree.flatten(state)
    owned = jax.tree.leaves(_own(solver, state))
    if {int(i) for i in shared} != {i for i, own in enumerate(owned) if not own}:
        raise ValueError(
            "the state that arrived has other parts than this client's: do server and clients use "
            "the same solver, and the same version of aipod?"
        )
    for i, array in shared.items():
        old = leaves[int(i)]
        if np.shape(array) != old.shape or array.dtype != old.dtype:
            raise ValueError(
                f"the state that arrived holds {array.dtype}{np.shape(array)} where this client "
                f"has {old.dtype}{old.shape}: do server and clients use the same model, and both "
                "float32 or both float64?"
            )
        leaves[int(i)] = jnp.asarray(array)
    return jax.tree.unflatten(structure, leaves)


def forget_own(solver: Alternating, state: State) -> State:
    """With corrections of zero, as at the start; the draws that were made stay made."""
    new = jax.tree.map(
        lambda leaf, own: jnp.zeros_like(leaf) if own else leaf, state, _own(solver, state)
    )
    new = dataclasses.replace(new, estimates=state.estimates)
    return new if solver.wire is None else with_known(new, first_rows(new))


def model_leaves(
    solver: Alternating, state: State, watch: PackedWatch | None = None
) -> dict[str, np.ndarray]:
    """What is needed to evaluate a state, to account for it, and to say how it converges.

    `watch`: in place of the one in the state.
    """
    found = {f"x{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state.x))}
    found |= {f"y{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state.y))}
    counts = [getattr(state.counts, field.name) for field in dataclasses.fields(state.counts)]
    found["counts"] = np.asarray(counts, np.int32)
    if state.curvature is not None:
        found["curvature"] = np.asarray(state.curvature.estimate)
    numbers = (state.watch if watch is None else watch).numbers()
    found |= {f"watch{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(numbers))}
    seen = solver.upper.seen(state.upper)
    sizes = {} if seen is None else {"rate": seen.rate, "off": seen.off}
    return found | {name: np.asarray(size) for name, size in sizes.items() if size is not None}


def with_model(solver: Alternating, state: State, model: Mapping[str, np.ndarray]) -> State:
    """The state with the x, the y and the numbers of a model."""

    def replaced(tree: PyTree, letter: str) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        new = [jnp.asarray(model[f"{letter}{i}"], leaf.dtype) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, new)

    x, y, watch = replaced(state.x, "x"), replaced(state.y, "y"), state.watch
    watch = watch.with_numbers(replaced(watch.numbers(), "watch"))
    state = eqx.tree_at(lambda s: (s.x, s.y, s.watch), state, (x, y, watch))
    seen: Any = solver.upper.seen
    if "rate" in model:
        state = eqx.tree_at(lambda s: seen(s.upper).rate, state, jnp.asarray(model["rate"]))
    if "off" in model:
        state = eqx.tree_at(lambda s: seen(s.upper).off, state, jnp.asarray(model["off"]))
    return state
