"""How the loops of a compiled step are written, by what a turn costs where the program runs.

A GPU is told by its host to start every turn of a loop, and is asked by it whether there is
another one. Where arrays are small that takes longer than the turn itself.
"""

import jax
import optax
from jaxtyping import PyTree

# At most so many turns are written out one behind the other: programs take longer to compile.
_WRITTEN = 10
# Points of more numbers are large: what a turn does takes far longer than to start it.
_LARGE = 2**22


def started_by_host() -> bool:
    """Whether the host starts every turn of a loop."""
    return bool(jax.default_backend() == "gpu")


def is_large(point: PyTree) -> bool:
    """Whether arrays like these are so large that only their memory counts."""
    return bool(optax.tree.size(point) > _LARGE)


def unrolled(count: int, point: PyTree) -> int:
    """How many turns of a loop over `count` of them to write out, for points of this size.

    It divides `count`.
    """
    if not started_by_host() or is_large(point):
        return 1
    return max((n for n in range(1, _WRITTEN + 1) if count and count % n == 0), default=1)
