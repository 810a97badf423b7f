"""The last move of x and y, which an upper level that finds its own pace looks back on."""

import dataclasses

import optax
from jaxtyping import PyTree

from aipod.algorithms._state import State, in_rows_of


def last_moves(state: State) -> tuple[PyTree, PyTree, PyTree] | None:
    """How far the last outer step moved x and y, and the y it ended with; None where not kept.

    A y that all clients share may have one row.
    """
    if state.moves is None:
        return None
    return *state.moves, in_rows_of(state.moves[1], state.y)


def with_moves(new: State, old: State) -> State:
    """The new state with the moves from the old one, where they are kept."""
    if (moves := last_moves(old)) is None:
        return new
    _, moved_y, before = moves
    moved_x = optax.tree.sub(new.x, old.x)
    moved_y = optax.tree.sub(in_rows_of(moved_y, new.y), before)
    return dataclasses.replace(new, moves=(moved_x, moved_y))
