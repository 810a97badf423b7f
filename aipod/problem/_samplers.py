"""Where batches come from: callables `key -> batch` that run on the device, inside the step."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.keys import word_of
from aipod._misc.tree import all_finite, is_numeric
from aipod.problem._pieces import any_piece, in_epochs, mixed, on_piece

Sampler = Callable[[PRNGKeyArray], Any]


class AbstractSampler(eqx.Module):
    """A callable `key -> batch` that also says what its batches are.

    Any function of a key may serve as a sampler. A subclass must answer `__call__`, and may answer
    the rest: `size` makes the ledger count examples, `expected` makes exact reference values
    possible, `random` lets deterministic methods accept the sampler, and `precomputed` lets a
    `Composite` compute features once per outer step.

    !!! example
        ```python
        class Shifted(aipod.AbstractSampler):
            data: jax.Array

            def __call__(self, key):
                return self.data + jax.random.normal(key)

            def expected(self):
                return self.data


        samples = Shifted(jnp.zeros(3))
        ```
    """

    @abc.abstractmethod
    def __call__(self, key: PRNGKeyArray) -> Any:
        """One batch. Use the key for one draw, or split it, but not both."""

    # Plain attributes, so that a subclass may answer with a field or a property as it likes.
    if TYPE_CHECKING:

        @property
        def size(self) -> int:
            """The number of examples in one batch."""

        @property
        def random(self) -> bool:
            """Whether two batches may differ."""

    else:
        size = 1
        random = True

    def expected(self) -> Any:
        """The batch whose objective is the expectation over all batches."""
        raise ValueError(_NO_EXPECTATION)

    def precomputed(self, function: Callable[[PyTree], PyTree], draws: int) -> "Self | None":
        """The sampler of function(batch), for a function that acts on each example by itself.

        None where applying the function to all data costs more than to `draws` batches.
        """
        return None


_NO_EXPECTATION = (
    "exact values need the expectation of the objective, and this sampler cannot give it: use "
    "aipod.FullBatch or aipod.Minibatches, or give your sampler a method expected() that returns "
    "the batch standing for all data."
)


def draw(samples: Sampler | None, key: PRNGKeyArray) -> Any:
    """One batch; None when the objective needs none."""
    return None if samples is None else samples(key)


def batch_size(samples: Sampler | None) -> int:
    """How many examples one draw is; 1 for samplers that do not say."""
    return int(getattr(samples, "size", 1))


def is_random(samples: Sampler | None) -> bool:
    """Whether two draws may differ; True for samplers that do not say."""
    return samples is not None and bool(getattr(samples, "random", True))


def expected(samples: Any) -> Any:
    """The batch whose objective is the expectation over the sampler."""
    if samples is None:
        return None
    if not hasattr(samples, "expected"):
        raise ValueError(_NO_EXPECTATION)
    return samples.expected()


def precomputed(
    samples: Any, function: Callable[[PyTree], PyTree], draws: int
) -> AbstractSampler | None:
    """`AbstractSampler.precomputed`; None for samplers that do not have it."""
    method = getattr(samples, "precomputed", None)
    return None if method is None else method(function, draws)


def leading_length(data: PyTree, owner: str) -> int:
    """The length of the leading axis that all arrays of data share, or `ValueError`."""
    leaves = jax.tree.leaves(data)
    lengths = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else None for leaf in leaves}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            f"{owner}: every array of data must have the examples on its leading axis, one length "
            f"for all; the shapes are {[jnp.shape(leaf) for leaf in leaves]}."
        )
    length = jnp.shape(leaves[0])[0]
    if length == 0:
        raise ValueError(f"{owner}: data holds no example.")
    return length


def check_batch_size(batch_size: Any) -> int:
    """Raises `ValueError` unless batch_size is a whole number, at least 1."""
    whole = isinstance(batch_size, int | np.integer) and not isinstance(batch_size, bool)
    if not whole or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number, at least 1, got {batch_size!r}.")
    return int(batch_size)


def as_data(data: PyTree, owner: str) -> PyTree:
    """Data as arrays of JAX; `ValueError` when it holds something else, NaN or infinity."""
    for leaf in jax.tree.leaves(data):
        if not is_numeric(leaf):
            raise ValueError(
                f"{owner}: data must be a pytree of numeric arrays, but it holds a "
                f"{type(leaf).__name__}: convert it to numbers first."
            )
    data = jax.tree.map(jnp.asarray, data)
    if not all_finite(data):
        raise ValueError(f"{owner}: data holds NaN or infinity: remove or impute those examples.")
    return data


class Constant(AbstractSampler):
    """Always the same batch."""

    batch: Any

    def __call__(self, key: PRNGKeyArray) -> Any:
        return self.batch

    @property
    def random(self) -> bool:
        return False

    def expected(self) -> Any:
        return self.batch


class FullBatch(AbstractSampler):
    """Always the whole of `data`: a deterministic problem.

    !!! example
        ```python
        samples = aipod.FullBatch((inputs, targets))
        ```
    """

    data: PyTree

    def __init__(self, data: PyTree) -> None:
        self.data = as_data(data, "FullBatch")
        leaves = jax.tree.leaves(self.data)
        if not leaves or any(jnp.size(leaf) == 0 for leaf in leaves):
            raise ValueError("FullBatch: data holds no example.")

    @property
    def size(self) -> int:
        leaves = jax.tree.leaves(self.data)
        return max((jnp.shape(leaf)[0] for leaf in leaves if jnp.ndim(leaf)), default=1)

    @property
    def random(self) -> bool:
        return False

    @property
    def pieces(self) -> int:
        """All data is one piece of the sum."""
        return 1

    def number(self, key: PRNGKeyArray, word: Array, count: Array) -> Array:
        """The piece of a draw, the only one."""
        return jnp.zeros((), jnp.int32)

    def on(self, number: Array, function: Callable[[PyTree], PyTree]) -> PyTree:
        """The function of a piece."""
        return function(self.data)

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        return self.data

    def expected(self) -> PyTree:
        return self.data

    def map(self, function: Callable[[PyTree], PyTree]) -> Self:
        """The sampler of function(batch), for a function that acts on each example."""
        return eqx.tree_at(lambda s: s.data, self, function(self.data))

    def precomputed(self, function: Callable[[PyTree], PyTree], draws: int) -> Self | None:
        return self.map(function) if draws else None


class Minibatches(AbstractSampler):
    """Batches of `batch_size` examples drawn uniformly from `data`.

    An objective that is a mean over the batch is then an unbiased estimate of the mean over
    `data`.

    **Arguments:**

    - `data`: a pytree of arrays with the examples on the leading axis.
    - `batch_size`: how many examples a batch holds.
    - `replace`: whether one batch may hold an example twice; without, a draw costs a
        permutation of the indices.
    - `epochs`: cut the data, mixed once, into fixed minibatches, and let each loop of a solver
        visit them in a new random order in every epoch: each example once. The order is a function
        of the run's key and of how many draws were made, so nothing else is kept.

    !!! example
        ```python
        samples = aipod.Minibatches((inputs, targets), 256)
        ```
    """

    data: PyTree
    size: int = eqx.field(static=True)
    replace: bool = eqx.field(static=True)
    epochs: bool = eqx.field(static=True)

    def __init__(
        self, data: PyTree, batch_size: int, *, replace: bool = True, epochs: bool = False
    ) -> None:
        self.data = as_data(data, "Minibatches")
        self.size = check_batch_size(batch_size)
        self.replace, self.epochs = replace, epochs
        if not isinstance(epochs, bool):
            raise ValueError(f"epochs must be True or False, got {epochs!r}.")
        length = leading_length(self.data, "Minibatches")
        if epochs:
            self.size = min(self.size, length)
            self.data = mixed(self.data)
        if not replace and self.size > length:
            raise ValueError(
                f"batch_size is {self.size}, but data holds {length} examples: draw with "
                "replace=True, or use aipod.FullBatch."
            )

    @property
    def pool(self) -> int:
        """How many examples there are to draw from."""
        return int(jnp.shape(jax.tree.leaves(self.data)[0])[0])

    @property
    def pieces(self) -> int:
        """How many fixed minibatches the data is."""
        return -(-self.pool // self.size)

    def number(self, key: PRNGKeyArray, word: Array, count: Array) -> Array:
        """The fixed minibatch of draw number `count`: by epochs, or any of them."""
        if self.epochs:
            return in_epochs(word, count, self.pieces)
        return any_piece(word_of(key), self.pieces)

    def on(self, number: Array, function: Callable[[PyTree], PyTree]) -> PyTree:
        """function of a fixed minibatch, weighted: its mean over all of them is that of `data`."""
        return on_piece(self.data, self.size, number, function)

    def __call__(self, key: PRNGKeyArray) -> PyTree:
        if self.replace:
            index = jax.random.randint(key, (self.size,), 0, self.pool)
        else:
            index = jax.random.permutation(key, self.pool)[: self.size]
        return jax.tree.map(lambda leaf: leaf[index], self.data)

    def expected(self) -> PyTree:
        return self.data

    def map(self, function: Callable[[PyTree], PyTree]) -> Self:
        """The sampler of function(batch), for a function that acts on each example."""
        return eqx.tree_at(lambda s: s.data, self, function(self.data))

    def precomputed(self, function: Callable[[PyTree], PyTree], draws: int) -> Self | None:
        return self.map(function) if self.pool <= draws * self.size else None
