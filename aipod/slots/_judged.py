"""Where along a move of y grad_y f tells what the move has delivered."""

from jaxtyping import PyTree

from aipod._misc.tree import axpy
from aipod.problem import Bilevel, is_random


def judged_at(problem: Bilevel, y: PyTree, moved_y: PyTree) -> PyTree:
    """The y at which the last move of y, which led to `y`, is judged.

    With random batches that is half way back along it. Noise throws y to and fro, and at the end of
    each throw grad_y f points along it, so that f seems to rise, on average by far more than a move
    of x promises; half way along the throws cancel out. Without them it is `y` itself: the slope at
    the end of a move tells sooner that y goes too far.
    """
    return axpy(y, -0.5, moved_y) if is_random(problem.lower_samples) else y
