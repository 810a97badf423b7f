"""How the loops of a compiled step are written, by what a turn costs where the program runs.

A GPU is told by its host to start every turn of a loop, and is asked by it whether there is
another one. Where arrays are small that takes longer than the turn itself.
"""

import jax

# At most so many turns are written out one behind the other: programs take longer to compile.
_WRITTEN = 5


def started_by_host() -> bool:
    """Whether the host starts every turn of a loop."""
    return bool(jax.default_backend() == "gpu")


def unrolled(count: int) -> int:
    """How many turns of a loop with `count` of them to write out; divides `count`."""
    if not started_by_host():
        return 1
    return max((n for n in range(1, _WRITTEN + 1) if count and count % n == 0), default=1)
