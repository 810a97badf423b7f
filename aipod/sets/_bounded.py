"""Bounds beside equalities."""

import numpy as np

from aipod.sets._bounds import Bounds, as_bounds
from aipod.sets._box import Bound
from aipod.sets._inputs import require_concrete
from aipod.sets._rows import AbstractRows
from aipod.sets._set import AbstractSet
from aipod.sets._simplex import check_made
from aipod.sets._within import AbstractBounded


class Bounded(AbstractBounded):
    """{y in a set : lower <= y <= upper}, for an `Affine`, a `Budget` or a `Flow` set.

    A projection on a bounded `Budget` costs a few passes over y. Beside several equalities it is a
    Newton method on their multipliers, of about ten steps of O(d r^2) for d entries and rank r; a
    sparse A is made dense for that.

    **Arguments:**

    - `set`: the equalities, which may have a coupling h(x).
    - `lower`, `upper`: as in `Box`.

    !!! example
        ```python
        portfolio = aipod.Bounded(aipod.Budget(1.0), lower=0.0, upper=0.4)
        portfolio.project(jnp.array([0.5, 0.9, -1.0]))  # [0.4, 0.4, 0.2]
        ```
    """

    rows: AbstractRows
    bounds: Bounds

    def __init__(self, set: AbstractSet, lower: Bound = -np.inf, upper: Bound = np.inf) -> None:
        require_concrete((lower, upper), "Bounded")
        rows = set.equalities() if isinstance(set, AbstractSet) else None
        if rows is None:
            raise ValueError(
                "Bounded takes an Affine, a Budget or a Flow set, got "
                f"{type(set).__name__}: bound the parts of a Product one by one."
            )
        self.rows, self.bounds = rows, as_bounds(lower, upper, "the Bounded set")
        check_made(self, "the Bounded set")
