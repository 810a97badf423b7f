"""What the last move of x promised, and what came of it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, PyTree

from aipod._misc.tree import axpy
from aipod.problem import Bilevel, is_random


class Promise(NamedTuple):
    """Numbers that tell whether y follows, of one outer step.

    - `promised`: the decrease of F that the last move of x promised.
    - `delivered`: the decrease of f along that move and the one of y that followed.
    - `seeming`: the same, judged at the end of the move of y alone.
    - `value`: f.
    """

    promised: Array
    delivered: Array
    seeming: Array
    value: Array


def slopes_along(
    problem: Bilevel, y: PyTree, moved_y: PyTree, slope: Callable[[PyTree], Array]
) -> tuple[Array, Array]:
    """How steeply f rises along the last move of y, which led to `y`: on the whole, and at its end.

    `slope(y)` is <grad_y f, moved_y> there. With random batches the end tells too much: noise
    throws y to and fro, and at the end of each throw grad_y f points along it, so that f seems to
    rise, on average by far more than a move of x promises. Half way along, the throws cancel out.
    Without them the end tells both, and sooner that y goes too far.
    """
    end = slope(y)
    return slope(axpy(y, -0.5, moved_y)) if is_random(problem.lower_samples) else end, end


def rise_along(function: Callable[[PyTree], Array], move: PyTree) -> Callable[[PyTree], Array]:
    """point -> the derivative of the function there along the move."""
    return lambda point: jax.jvp(function, (point,), (move,))[1]
