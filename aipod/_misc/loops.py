"""How the loops of a compiled step are written, by what they cost where the program runs.

A GPU is told by its host to start every program, and is asked by it whether a loop has another
turn. Where arrays are small that takes as long as what is computed. To write out turns one behind
the other saves a tenth of such a step, but programs then take up to three times as long to compile,
which only tens of thousands of steps would make up for.
"""

import jax
import optax
from jaxtyping import PyTree

# Points of more numbers are large: what a program does with them takes longer than to start it.
_LARGE = 2**22


def started_by_host() -> bool:
    """Whether the host starts every program of a step."""
    return bool(jax.default_backend() == "gpu")


def is_large(point: PyTree) -> bool:
    """Whether arrays like these are so large that only their memory counts."""
    return bool(optax.tree.size(point) > _LARGE)
