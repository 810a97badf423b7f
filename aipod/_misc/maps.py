"""Memory maps of this process, which compiled programs use up."""

import gc
from pathlib import Path

import jax

_MAPS, _LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
# The share of the limit from which on programs are freed.
_MUCH = 0.7


def make_room(most: int | None = None) -> bool:
    """Frees the compiled programs of JAX where this process has nearly all the maps it may have.

    Each compiled program has several, and JAX keeps them all. At the limit, usually 65,530 on
    Linux, the next compilation would end the process with a segmentation fault: a long sweep over
    problems with functions of their own gets there. What is needed again is compiled again.

    `most`: how many maps there may be; by default a share of the system's limit. Returns whether
    programs were freed.
    """
    try:
        if most is None:
            most = int(_MUCH * int(_LIMIT.read_text()))
        count = _MAPS.read_bytes().count(b"\n")
    except (OSError, ValueError):
        # Other systems have no such limit.
        return False
    if count <= most:
        return False
    jax.clear_caches()
    gc.collect()
    return True
