"""What a slot is given when its turn comes in an outer step."""

from typing import NamedTuple

from jaxtyping import PRNGKeyArray, PyTree

from aipod.problem._bilevel import Bilevel
from aipod.stepsize._stepsize import Rates


class Turn(NamedTuple):
    """The problem, where x and y stand by now, the step sizes in force, and a key to draw with."""

    problem: Bilevel
    x: PyTree
    y: PyTree
    rates: Rates
    key: PRNGKeyArray
