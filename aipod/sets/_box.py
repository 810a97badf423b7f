"""Bounds on every entry, and nothing else."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import ArrayLike, PyTree

from aipod.sets._bounds import Bounds, as_bounds
from aipod.sets._inputs import require_concrete
from aipod.sets._rows import NoRows
from aipod.sets._within import AbstractBounded

Bound: TypeAlias = PyTree[ArrayLike] | Callable[[PyTree], PyTree[ArrayLike]]


class Box(AbstractBounded):
    """{y : lower <= y <= upper}, entry by entry.

    **Arguments:**

    - `lower`, `upper`: one number for all entries; or the structure of y with a number or an array
        of the same shape for each array; or, in the lower level, a function of x that returns one
        of these. They may be infinite, and they may be equal.

    !!! example
        ```python
        aipod.Box(0.0, 1.0).project(jnp.array([-1.0, 0.3, 2.0]))  # [0., 0.3, 1.]
        aipod.Box(lower=lambda x: -jnp.exp(x)).project(y, x)
        ```
    """

    rows: NoRows
    bounds: Bounds

    def __init__(self, lower: Bound = -np.inf, upper: Bound = np.inf) -> None:
        require_concrete((lower, upper), "Box")
        self.rows, self.bounds = NoRows(), as_bounds(lower, upper, "the Box")
