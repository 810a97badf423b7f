"""Data of clients that stays in host memory or on disk, and comes to the device as it is needed."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from aipod._misc.digest import digest_arrays
from aipod._misc.tree import is_numeric
from aipod.problem._client_pieces import ClientBatch
from aipod.problem._client_samplers import (
    CohortMinibatches,
    checked_counts,
    places,
    weighted,
)
from aipod.problem._samplers import AbstractSampler, check_batch_size, leading_length

# Clients of which one example tells data apart.
_LOOKED_AT = 64


class Store:
    """Arrays of the host, and the rows of the clients that come next, read ahead in a thread."""

    def __init__(self, data: PyTree) -> None:
        self.data = data
        # Of the thread that made it: a thread that reads may have other settings.
        self.kinds = jax.tree.map(lambda leaf: jax.dtypes.canonicalize_dtype(leaf.dtype), data)
        self.read_ahead = 0
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "aipod-read-ahead")
        self._coming: tuple[bytes, Any] | None = None

    def shapes(self, rows: tuple[int, ...], axes: int) -> PyTree:
        """What a fetch returns: `rows` in place of the first `axes` axes of each array."""

        def one(leaf: np.ndarray, kind: np.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*rows, *leaf.shape[axes:]), kind)

        return jax.tree.map(one, self.data, self.kinds)

    def _at(self, index: Any) -> PyTree:
        """A copy in memory of these rows, in the types that JAX has for them."""
        # A slice of a memory-mapped file is read from disk here.
        return jax.tree.map(
            lambda leaf, kind: np.ascontiguousarray(leaf[index], kind), self.data, self.kinds
        )

    def rows(self, chosen: ArrayLike) -> PyTree:
        """The rows of these clients."""
        return self._at(np.asarray(chosen))

    def fetch(self, chosen: ArrayLike, coming: ArrayLike) -> PyTree:
        """The rows of the chosen clients; those of the coming ones are read while they are used."""
        now, later = np.asarray(chosen), np.asarray(coming)
        waiting, self._coming = self._coming, None
        if waiting is not None and waiting[0] == now.tobytes():
            found = waiting[1].result()
            self.read_ahead += 1
        else:
            found = self.rows(now)
        self._coming = later.tobytes(), self._thread.submit(self.rows, later)
        return found

    def mark(self) -> np.ndarray:
        """A number for the data, by which a resumed run notices other data; from some examples."""
        clients = len(jax.tree.leaves(self.data)[0])
        some = np.unique(np.linspace(0, clients - 1, _LOOKED_AT).astype(int))
        parts = [
            (str(leaf.shape), np.asarray(leaf[some, 0])) for leaf in jax.tree.leaves(self.data)
        ]
        return np.frombuffer(bytes.fromhex(digest_arrays(parts))[:8], np.uint32)

    def examples(self, places: ArrayLike) -> PyTree:
        """For each client the examples at these places."""
        index = np.asarray(places)
        rows = np.arange(len(index))[:, None]
        return self._at((rows, index))


class HostClientMinibatches(AbstractSampler):
    """`ClientMinibatches` for data that is larger than the device: it stays on the host.

    With partial participation the data of each cohort is sent to the device once for an outer step,
    and that of the next cohort is read meanwhile. With everyone present each batch is sent when it
    is drawn. What is drawn is the same as from `ClientMinibatches`.

    **Arguments:**

    - `data`: a pytree of NumPy arrays with axes (client, example, ...); memory-mapped files stay on
        disk. They must not change during a run, and are not looked through for NaN.
    - `batch_size`, `counts`: as for `ClientMinibatches`.

    !!! example
        ```python
        import numpy as np

        images = np.zeros((3, 40, 784), np.float32)  # or np.load("images.npy", mmap_mode="r")
        samples = aipod.HostClientMinibatches(images, 16)
        ```
    """

    store: Store = eqx.field(static=True)
    counts: Array | None
    mark: Array
    clients: int = eqx.field(static=True)
    pool: int = eqx.field(static=True)
    per_client: int | None = eqx.field(static=True)

    def __init__(
        self, data: PyTree, batch_size: int | None, *, counts: ArrayLike | None = None
    ) -> None:
        for leaf in jax.tree.leaves(data):
            if not isinstance(leaf, np.ndarray) or not is_numeric(leaf) or leaf.ndim < 2:
                raise ValueError(
                    "HostClientMinibatches: data must be a pytree of numeric NumPy arrays with the "
                    f"axes (client, example, ...), but it holds a {type(leaf).__name__}: use "
                    "numpy.asarray, or numpy.load(..., mmap_mode='r')."
                )
        self.clients = leading_length(data, "HostClientMinibatches")
        lengths = {leaf.shape[1] for leaf in jax.tree.leaves(data)}
        if len(lengths) != 1:
            raise ValueError(
                "HostClientMinibatches: every array of data must have as many examples of a "
                f"client on its second axis as the others; the lengths are {sorted(lengths)}."
            )
        self.pool = lengths.pop()
        self.per_client = None if batch_size is None else check_batch_size(batch_size)
        self.counts = checked_counts(counts, self.clients, self.pool)
        self.store = Store(data)
        self.mark = jnp.asarray(self.store.mark())

    @property
    def size(self) -> int:
        """Examples in one draw, of all clients together."""
        return self.clients * (self.pool if self.per_client is None else self.per_client)

    @property
    def random(self) -> bool:
        return self.per_client is not None

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        if self.per_client is None:
            # All of it, every time: for few clients, or to look at shapes.
            everyone = jnp.arange(self.clients)
            found = jax.pure_callback(
                self.store.rows, self.store.shapes((self.clients,), 1), everyone
            )
            return weighted(ClientBatch(found), self.counts)
        shape = (self.clients, self.per_client)
        index = places(key, shape, self.pool, self.counts)
        found = jax.pure_callback(self.store.examples, self.store.shapes(shape, 2), index)
        return ClientBatch(found)

    def expected(self) -> PyTree:
        """All data, on the device; for exact values of problems that fit there."""
        return weighted(ClientBatch(jax.tree.map(jnp.asarray, self.store.data)), self.counts)

    def precomputed(self, function: Callable[[PyTree], PyTree], draws: int) -> None:
        return None

    @property
    def reads_ahead(self) -> bool:
        """Whether `take` wants to know the clients that come next."""
        return True

    def take(self, chosen: Array, members: int, coming: Array | None = None) -> CohortMinibatches:
        """The batches of the chosen clients, whose data is fetched now."""
        shapes = self.store.shapes(chosen.shape, 1)
        later = chosen if coming is None else coming
        batch = ClientBatch(jax.pure_callback(self.store.fetch, shapes, chosen, later))
        if self.per_client is None:
            batch = weighted(batch, None if self.counts is None else self.counts[chosen])
        return CohortMinibatches(
            batch, self.counts, chosen, self.clients, members, self.pool, self.per_client
        )

    def by_client(self) -> Any:
        raise ValueError(
            "data that stays on the host is not spread over devices yet: leave mesh= out, or give "
            "each process the data of its own clients on its devices."
        )
