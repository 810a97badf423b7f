"""The problem: two objectives, two sets, two sources of samples."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from aipod._misc.tree import all_finite, is_numeric, same_structure
from aipod.problem._composite import AtX, Objective, at_fixed_x, by_client, takes_common
from aipod.problem._samplers import Constant, Sampler, expected, is_random
from aipod.sets import AbstractSet, Free


class Held(NamedTuple):
    """Both objectives at the x of the current outer step."""

    upper: AtX
    lower: AtX


class Bilevel(eqx.Module):
    """min_x E f(x, y*(x)) over the upper set, y*(x) = argmin_y E g(x, y) over the lower set.

    The paper's problem `opt0`. x and y are pytrees.

    **Arguments:**

    - `upper`: f, (x, y, batch) -> scalar.
    - `lower`: g, (x, y, batch) -> scalar, strongly convex in y.
    - `upper_set`, `lower_set`: where x and y must lie; default everywhere. A coupling h(x) in the
        lower set makes it move with x.
    - `upper_samples`, `lower_samples`: any callable key -> batch; default no batch (None).

    !!! example
        ```python
        problem = aipod.Bilevel(
            upper=lambda x, y, _: jnp.sum((y - 1.0) ** 2) + 0.1 * jnp.sum(x**2),
            lower=lambda x, y, _: 0.5 * jnp.sum((y - x) ** 2),
            lower_set=aipod.Budget(1.0),
        )
        ```
    """

    upper: Objective
    lower: Objective
    upper_set: AbstractSet = Free()
    lower_set: AbstractSet = Free()
    upper_samples: Sampler | None = None
    lower_samples: Sampler | None = None
    # Set during an outer step alone, while x does not change: see `hold`.
    held: "Held | None" = eqx.field(kw_only=True, default=None, repr=False)

    def __check_init__(self) -> None:
        for name in ("upper", "lower"):
            if not callable(getattr(self, name)):
                raise ValueError(f"{name} must be a function (x, y, batch) -> scalar.")
        for name in ("upper_set", "lower_set"):
            if not isinstance(getattr(self, name), AbstractSet):
                raise ValueError(f"{name} must be a set, such as aipod.Free() or aipod.Affine.")
        for name in ("upper_samples", "lower_samples"):
            samples = getattr(self, name)
            if samples is not None and not callable(samples):
                raise ValueError(
                    f"{name} must be a callable key -> batch, such as aipod.Minibatches(data, 64), "
                    f"got {type(samples).__name__}."
                )
        if self.upper_set.apart != self.lower_set.apart:
            raise ValueError(
                "clients gossip at both levels or at none: let upper_set and lower_set be the same "
                "aipod.Gossip, as aipod.federated.federate(..., graph=...) makes them."
            )
        if self.lower_set.apart and self.lower_set.of_one is not self.lower_set:
            raise ValueError(
                "lower_set has clients without a server that agree within a set: which bounds hold "
                "is decided from one average of all clients. Use aipod.Consensus() there."
            )
        if self.upper_set.coupled:
            raise ValueError(
                "upper_set has a coupling, but the upper level's constraint B x = e depends on "
                "nothing: leave the coupling out."
            )

    def check(self, x: PyTree, y: PyTree) -> None:
        """Raises `ValueError` when x, y, the sets and the objectives do not fit together."""
        for name, tree in (("x0", x), ("y0", y)):
            if not jax.tree.leaves(tree):
                raise ValueError(
                    f"{name} holds no numbers: pass it in the structure of a solution."
                )
            for leaf in jax.tree.leaves(tree):
                if not is_numeric(leaf):
                    raise ValueError(
                        f"{name} holds a {type(leaf).__name__}, but x and y are pytrees of arrays: "
                        "keep it out, as with equinox.partition(model, equinox.is_inexact_array)."
                    )
                if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                    raise ValueError(
                        f"{name} must hold real floating-point arrays, found "
                        f"{jnp.result_type(leaf)}: convert it, as in jnp.asarray({name}, float), "
                        "or keep it out, as with equinox.partition(model, "
                        "equinox.is_inexact_array)."
                    )
            if not all_finite(tree):
                raise ValueError(f"{name} holds NaN or infinity: start from a finite point.")
        x, y = self.wide(x), self.wide(y)
        self.upper_set.check(x, name="upper_set")
        self.lower_set.check(y, x, name="lower_set")
        _check_projection("upper_set", lambda: self.upper_set.project(x), x)
        _check_projection("lower_set", lambda: self.lower_set.project(y, x), y)
        for name, objective, samples in (
            ("upper", self.upper, self.upper_samples),
            ("lower", self.lower, self.lower_samples),
        ):
            _check_objective(name, objective, samples, x, y)

    def wide(self, point: PyTree) -> PyTree:
        """A point of one row for all clients with a row for each of them, without the memory."""
        leaves = jax.tree.leaves(point)
        once = all(np.ndim(leaf) and np.shape(leaf)[0] == 1 for leaf in leaves)
        clients = self.clients
        if not once or clients is None:
            return point
        return jax.tree.map(
            lambda leaf: np.broadcast_to(leaf, (clients, *np.shape(leaf)[1:])), point
        )

    def expected(self) -> "Bilevel":
        """The deterministic problem of the expectations, for exact reference values."""
        return Bilevel(
            self.upper,
            self.lower,
            self.upper_set,
            self.lower_set,
            _constant(self.upper_samples),
            _constant(self.lower_samples),
        )

    @property
    def fully_federated(self) -> bool:
        """Whether both sets are agreement between clients, all of them in every round."""
        return self.upper_set.everyone and self.lower_set.everyone

    @property
    def partly_federated(self) -> bool:
        """Whether both sets are agreement between clients, and cohorts of them can be taken."""
        clients = self.clients
        return clients is not None and self.part < 1 and self.lower_set.present(clients) < clients

    @property
    def part(self) -> float:
        """The share of the clients that take part in a round; 1 where there are none."""
        clients = self.clients
        return 1.0 if clients is None else self.upper_set.present(clients) / clients

    @property
    def takes_common(self) -> bool:
        """Whether both objectives take points that all clients share, with a client axis of 1."""
        return takes_common(self.upper) and takes_common(self.lower)

    @property
    def divisible(self) -> bool:
        """Whether `take` gives the problem of some of the clients."""
        samples = (self.upper_samples, self.lower_samples)
        return self.takes_common and all(hasattr(one, "take") for one in samples)

    @property
    def clients(self) -> int | None:
        """How many clients there are, where the problem is `divisible`."""
        samples: Any = self.upper_samples
        return samples.clients if self.divisible else None

    @property
    def reads_ahead(self) -> bool:
        """Whether data comes from the host, which wants to know the clients that come next."""
        samples = (self.upper_samples, self.lower_samples)
        return any(getattr(one, "reads_ahead", False) for one in samples)

    def take(
        self,
        chosen: Array,
        clients: int,
        members: int,
        axis: str | None = None,
        coming: Array | None = None,
    ) -> "Bilevel":
        """The problem of the chosen ones of so many clients, where it is `divisible`.

        Only the first `members` of them count; the others fill up the devices of a mesh, along
        whose `axis` the clients are spread. `coming`: who is chosen in the next outer step.
        """
        objectives: Any = (self.upper, self.lower)
        samples: Any = (self.upper_samples, self.lower_samples)
        sets = (self.upper_set, self.lower_set)
        return Bilevel(
            *(one.take(chosen, members) for one in objectives),
            *(one.cohort(chosen, clients, members, axis) for one in sets),
            *(
                one.take(chosen, members, coming)
                if getattr(one, "reads_ahead", False)
                else one.take(chosen, members)
                for one in samples
            ),
        )

    def by_client(self) -> "Bilevel":
        """For each leaf whether it has a row for each client."""
        parts = (self.upper, self.lower, self.upper_set, self.lower_set)
        structure = jax.tree.structure(self)
        masks = [by_client(part) for part in (*parts, self.upper_samples, self.lower_samples)]
        return jax.tree.unflatten(structure, jax.tree.leaves(masks))

    def lower_at(self, x: PyTree, draws: int) -> AtX:
        """g(x, ., .) and its sampler for a loop of `draws` batches in which x stays fixed."""
        if self.held is not None:
            return self.held.lower
        return at_fixed_x(self.lower, self.lower_samples, x, draws)

    def upper_at(self, x: PyTree, draws: int) -> AtX:
        """The same for f."""
        if self.held is not None:
            return self.held.upper
        return at_fixed_x(self.upper, self.upper_samples, x, draws)

    def inside(self) -> "Bilevel":
        """The problem as a solver sees it: without a server no set averages over all clients."""
        if not (self.upper_set.apart or self.lower_set.apart):
            return self
        upper_set, lower_set = self.upper_set.inside(), self.lower_set.inside()
        return dataclasses.replace(self, upper_set=upper_set, lower_set=lower_set)

    def hold(self, x: PyTree, *, lower_draws: int, upper_draws: int) -> "Bilevel":
        """This problem for one outer step at x, in which all loops together draw so many batches.

        `lower_at` and `upper_at` are computed here once, and serve every loop of the step.
        """
        held = Held(self.upper_at(x, upper_draws), self.lower_at(x, lower_draws))
        return dataclasses.replace(self, held=held)


def is_noisy(problem: Bilevel) -> bool:
    """Whether two draws of either level may differ."""
    return is_random(problem.lower_samples) or is_random(problem.upper_samples)


def _constant(samples: Sampler | None) -> Sampler | None:
    """The sampler that always gives the expectation of this one."""
    return None if samples is None else Constant(expected(samples))


def _check_projection(name: str, project: Callable[[], PyTree], point: PyTree) -> None:
    """Raises `ValueError` unless a set's projection has the structure and shapes of the point."""
    found = eqx.filter_eval_shape(project)
    shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (found, point)]
    if not same_structure(found, point) or shapes[0] != shapes[1]:
        raise ValueError(
            f"{name}.project returns shapes {shapes[0]} for a point of shapes {shapes[1]}: a "
            "projection must keep structure and shapes."
        )


def _check_objective(
    name: str, objective: Objective, samples: Sampler | None, x: PyTree, y: PyTree
) -> None:
    try:
        batch = None if samples is None else eqx.filter_eval_shape(samples, jax.random.key(0))
    except Exception as error:
        raise ValueError(
            f"{name}_samples(key) raised {type(error).__name__}: {first_line(error)} It must be a "
            "function of one JAX key that returns a batch."
        ) from error
    try:
        value = eqx.filter_eval_shape(objective, x, y, batch)
    except Exception as error:
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves((x, y))]
        raise ValueError(
            f"{name}(x, y, batch) raised {type(error).__name__} on arrays of shapes {shapes}: "
            f"{first_line(error)}"
        ) from error
    shape = getattr(value, "shape", None)
    if shape != ():
        raise ValueError(
            f"{name} must return a scalar, but it returns "
            f"{'shape ' + str(shape) if shape is not None else type(value).__name__}: reduce it "
            "with jnp.sum or jnp.mean."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"{name} must return a real floating-point number, but it returns {value.dtype}: "
            "convert it, as with .astype(float) before the sum, or jnp.real."
        )


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).splitlines()[0] if str(error) else "no message."
