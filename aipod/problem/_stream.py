"""Batches that an iterator of the host makes: a DataLoader, a data set that is read as it comes."""

import collections
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray, PyTree

from aipod._misc.tree import is_numeric, same_structure
from aipod.problem._samplers import AbstractSampler, check_batch_size

# Draws whose batch is remembered, since a program may ask again for the same one.
_REMEMBERED = 64


class Feed:
    """Takes batches from an iterator in a thread, a few ahead of what is asked for."""

    def __init__(self, batches: Callable[[], Iterable[Any]], ahead: int) -> None:
        self._batches = batches
        self._ready: queue.Queue[Any] = queue.Queue(ahead)
        self._given: collections.OrderedDict[bytes, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.first = next(self._new_pass(), None)
        if self.first is None:
            raise ValueError(_NOTHING)
        self.first = _as_arrays(self.first)
        # Of the thread that made it: the thread that reads may have other settings.
        self.first = jax.tree.map(
            lambda leaf: leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype)), self.first
        )

    def _new_pass(self) -> Iterator[Any]:
        return iter(self._batches())

    def _produce(self) -> None:
        try:
            while True:
                empty = True
                for batch in self._new_pass():
                    made = _as_arrays(batch)
                    if not _alike(made, self.first):
                        continue
                    empty = False
                    self._ready.put(jax.tree.map(lambda a, b: a.astype(b.dtype), made, self.first))
                if empty:
                    raise ValueError(_NOTHING)
        except Exception as error:
            # Given to the one who asks; a thread has nobody to tell.
            self._ready.put(error)

    def batch(self, words: ArrayLike) -> PyTree:
        """The batch of the draw that these words of a key stand for; a new one for a new draw."""
        name = np.asarray(words).tobytes()
        with self._lock:
            if name in self._given:
                return self._given[name]
            if self._thread is None:
                self._thread = threading.Thread(target=self._produce, daemon=True)
                self._thread.start()
            found = self._ready.get()
            if isinstance(found, Exception):
                self._ready.put(found)
                raise found
            self._given[name] = found
            while len(self._given) > _REMEMBERED:
                self._given.popitem(last=False)
            return found


_NOTHING = (
    "Stream: the batches have come to an end: give something that can be gone through again, such "
    "as a DataLoader or a list, or a function that returns a new iterator."
)


def _as_arrays(batch: Any) -> PyTree:
    def one(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if not is_numeric(array):
            raise ValueError(
                f"Stream: a batch holds a {type(leaf).__name__}: give pytrees of numeric arrays."
            )
        return np.ascontiguousarray(array)

    return jax.tree.map(one, batch)


def _alike(batch: PyTree, first: PyTree) -> bool:
    """Whether a batch has the shapes of the first; an incomplete last one of a pass has not."""
    if not same_structure(batch, first):
        raise ValueError(
            f"Stream: a batch has the structure {jax.tree.structure(batch)}, but the first one had "
            f"{jax.tree.structure(first)}: give batches of one kind."
        )
    pairs = zip(jax.tree.leaves(batch), jax.tree.leaves(first), strict=True)
    return all(a.shape == b.shape for a, b in pairs)


class Stream(AbstractSampler):
    """Batches from an iterator of the host, taken ahead in a thread while the device computes.

    Every draw gets the next batch. When a pass through the iterator is over, the next one begins;
    an incomplete last batch is left out. A resumed run begins a new pass, so it is not the same run
    bit for bit; take `Minibatches` where data fit on the device.

    **Arguments:**

    - `batches`: anything that can be gone through again and again, such as a PyTorch `DataLoader`
        or a list, or a function that returns a new iterator; batches are pytrees of arrays, all
        with the shapes of the first.
    - `size`: examples in a batch, for the ledger; by default the first axis of the first array.
    - `ahead`: how many batches to keep ready.

    !!! example
        ```python
        import numpy as np

        batches = [(np.ones((8, 3)), np.ones(8)), (np.zeros((8, 3)), np.zeros(8))]
        samples = aipod.Stream(batches)
        ```
    """

    feed: Feed = eqx.field(static=True)
    size: int = eqx.field(static=True)

    def __init__(
        self,
        batches: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        size: int | None = None,
        ahead: int = 4,
    ) -> None:
        if not callable(batches) and (not isinstance(batches, Iterable) or _is_spent(batches)):
            raise ValueError(
                "Stream: batches must be something that can be gone through more than once, such "
                "as a DataLoader or a list, or a function that returns a new iterator, got a "
                f"{type(batches).__name__}."
            )
        given: Any = batches
        passes: Callable[[], Iterable[Any]] = given if callable(given) else lambda: given
        self.feed = Feed(passes, check_batch_size(ahead))
        leaves = jax.tree.leaves(self.feed.first)
        lengths = [leaf.shape[0] for leaf in leaves if leaf.ndim]
        self.size = check_batch_size(size) if size is not None else (lengths or [1])[0]

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.feed.first
        )
        return jax.pure_callback(self.feed.batch, shapes, jax.random.key_data(key))


def _is_spent(batches: Any) -> bool:
    """Whether going through it once uses it up, as with a generator."""
    return isinstance(batches, Iterator)
