"""Several processes that make one run together, as `jax.distributed` starts them.

All of them run the same script. They must take every decision alike, or they wait for each other
for ever: so what one clock says counts for all. The first process prints and writes.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree


def alone() -> bool:
    """Whether this is the only process."""
    return jax.process_count() == 1


def first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def said_by_first(value: float) -> float:
    """A number of the first process, for all of them."""
    if alone():
        return value
    from jax.experimental import multihost_utils

    return float(multihost_utils.broadcast_one_to_all(np.asarray(value, np.float32)))


def wait_for_all(name: str) -> None:
    """Returns when all processes have come here."""
    if not alone():
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def here(tree: PyTree) -> Any:
    """Arrays that are spread over several processes, whole and on this one."""
    if alone():
        return tree
    from jax.experimental import multihost_utils

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if leaf.is_fully_addressable:
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = one(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        if leaf.is_fully_replicated:
            return jax.device_put(np.asarray(leaf.addressable_data(0)), jax.local_devices()[0])
        whole = multihost_utils.process_allgather(leaf, tiled=True)
        return jax.device_put(np.asarray(whole), jax.local_devices()[0])

    return jax.tree.map(one, tree)
