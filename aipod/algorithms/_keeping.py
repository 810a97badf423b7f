"""How the state of a federation is kept between outer steps: what is common, once.

Inside an outer step clients work on their own rows of y and of what belongs to it. When the step is
over, the rows of most quantities are equal, and one of them is kept. x is common inside the step
too, unless clients move it by themselves: its gradient is then formed as one sum.

With partial participation an outer step is made by a cohort: the rows of the chosen clients are
taken from what each client keeps, and put back afterwards.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.shuffle import some_of
from aipod.algorithms._carried import Layout
from aipod.algorithms._sharing import common_parts, has_cohorts
from aipod.algorithms._state import State
from aipod.problem import Bilevel
from aipod.sets import AbstractSet

# The axis of a mesh along which clients are spread.
CLIENTS = "clients"
Shape = tuple[int, ...]


class Keeping(eqx.Module):
    """Which leaves of a state have a row for each client, and which of them are kept once.

    - `clients`, `present`: how many there are, and how many of them make an outer step.
    - `shapes`: of every leaf as the user sees it, all clients beside each other.
    - `once`: the leaves of which one row is kept.
    - `wide`: those of them that get a row for each client inside an outer step.
    - `own`: the leaves with a row of its own for each client.
    - `single`: whether x has one row inside an outer step.
    - `mesh`: the devices over which the clients are spread, along `CLIENTS`; None for one device.
    """

    clients: int = eqx.field(static=True)
    present: int = eqx.field(static=True)
    shapes: tuple[Shape, ...] = eqx.field(static=True)
    once: tuple[bool, ...] = eqx.field(static=True)
    wide: tuple[bool, ...] = eqx.field(static=True)
    own: tuple[bool, ...] = eqx.field(static=True)
    single: bool = eqx.field(static=True)
    mesh: Mesh | None = eqx.field(static=True, default=None)

    @property
    def devices(self) -> int:
        """The devices along the mesh's axis of clients."""
        return 1 if self.mesh is None else self.mesh.shape[CLIENTS]

    @property
    def some(self) -> bool:
        """Whether only some of the clients make an outer step."""
        return self.present < self.clients

    def rows(self, members: int) -> int:
        """So many clients, and what fills up the last device."""
        return -(-members // self.devices) * self.devices

    def by_leaf(self, function: Callable[[Array, bool], Any], state: State) -> State:
        """function(leaf, whether each client has a row of its own in it) for all leaves."""
        return _by_leaf(function, state, self.own)

    def layout(self, state: State) -> Layout:
        """How a loop carries a kept state."""
        return Layout.of(state, self.own, alone=self.mesh is None)

    def everyone(self) -> "Keeping":
        """For an outer step that all clients make."""
        return dataclasses.replace(self, present=self.clients)

    def kept(self, state: State) -> State:
        """A state of all clients as it is kept between steps."""
        return _by_leaf(lambda leaf, once: leaf[:1] if once else leaf, state, self.once)

    def whole(self, state: State) -> State:
        """A kept state with all clients beside each other, as the user sees it."""
        return _by_leaf(
            lambda leaf, shape: leaf if leaf.shape == shape else jnp.broadcast_to(leaf, shape),
            state,
            self.shapes,
        )

    def narrow(self, state: State) -> State:
        """What is kept of a state that an outer step of all clients works on."""
        return _by_leaf(lambda leaf, wide: leaf[:1] if wide else leaf, state, self.wide)

    def points(self, state: State) -> tuple[PyTree, PyTree]:
        """x and y of a kept state for all clients."""
        return spread(state.x, self.clients), spread(state.y, self.clients)

    def sets(
        self, problem: Bilevel, points: tuple[PyTree, PyTree]
    ) -> tuple[AbstractSet, AbstractSet]:
        """The sets of x and y for points that may be kept once."""

        def fitting(one: AbstractSet, point: PyTree) -> AbstractSet:
            once = jax.tree.leaves(point)[0].shape[0] == 1
            return (one.once(self.clients) or one) if once else one

        return fitting(problem.upper_set, points[0]), fitting(problem.lower_set, points[1])

    def problem(
        self, problem: Bilevel, chosen: Array | None, coming: PRNGKeyArray | None = None
    ) -> Bilevel:
        """The problem of an outer step on one device; `coming` chooses the clients of the next."""
        if chosen is not None:
            later = None if coming is None or not problem.reads_ahead else self.choose(coming)
            problem = problem.take(chosen, self.clients, self.present, coming=later)
        return self.narrowed(problem)

    def narrowed(self, problem: Bilevel) -> Bilevel:
        """A problem of an outer step for one x that all clients share, where that is so."""
        return _single(problem, self.present) if self.single else problem

    def working(self, state: State, chosen: Array | None) -> State:
        """A kept state as an outer step works on it."""
        return self.widened(self.taken(state, chosen), self.present)

    def taken(self, state: State, chosen: Array | None) -> State:
        """With the rows of the chosen clients alone."""
        if chosen is None:
            return state
        layout = self.layout(state)
        return layout.state(
            layout.by_array(lambda a, own: a[chosen] if own else a, layout.carried(state))
        )

    def widened(self, state: State, rows: int) -> State:
        """With so many rows of what each client works on."""

        def one(leaf: Array, wide: bool) -> Array:
            return jnp.broadcast_to(leaf, (rows, *leaf.shape[1:])) if wide else leaf

        return _by_leaf(one, state, self.wide)

    def after(self, state: State, before: State, chosen: Array | None) -> State:
        """What is kept after an outer step that was made from `before`."""
        return self.put_back(self.narrow(state), before, chosen)

    def put_back(self, state: State, before: State, chosen: Array | None) -> State:
        """The rows of the chosen clients, put back into those of all."""
        if chosen is None:
            return state

        def one(new: Array, old: Array, own: bool) -> Array:
            return old.at[chosen].set(new[: self.present]) if own else new

        layout = self.layout(before)
        both = layout.carried(state), layout.carried(before)
        return layout.state(layout.by_array(one, *both))

    def choose(self, key: PRNGKeyArray) -> Array | None:
        """The clients of an outer step, in their order; None for all of them."""
        if not self.some:
            return None
        return jnp.sort(some_of(key, self.clients, self.present))


def _by_leaf(function: Any, state: State, beside: tuple) -> State:
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(
        structure, [function(leaf, other) for leaf, other in zip(leaves, beside, strict=True)]
    )


def _single(problem: Bilevel, clients: int) -> Bilevel:
    """The problem for one x that all clients share."""
    return eqx.tree_at(lambda p: p.upper_set, problem, problem.upper_set.once(clients))


def spread(tree: PyTree, clients: int) -> PyTree:
    """A row for each client, without those that fill up a mesh."""

    def one(leaf: Array) -> Array:
        if leaf.shape[0] > 1:
            return leaf[:clients]
        return jnp.broadcast_to(leaf, (clients, *leaf.shape[1:]))

    return jax.tree.map(one, tree)


def keeping_of(solver: Any, problem: Bilevel, x: PyTree, y: PyTree) -> Keeping | None:
    """How to keep the states of a solver on a problem; None where there is nothing to share.

    Only the shapes of x and y are looked at.
    """
    sets, clients = (problem.upper_set, problem.lower_set), problem.clients
    if clients is None:
        return None
    upper_set, lower_set = (one.once(clients) for one in sets)
    if upper_set is None or lower_set is None:
        return None

    def shapes(of: Bilevel, x: PyTree, y: PyTree) -> Any:
        return eqx.filter_eval_shape(solver.initial, of, x, y)

    def rows(tree: PyTree, count: int) -> PyTree:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), tree)

    x, y = rows(x, clients), rows(y, clients)
    full = shapes(problem, x, y)
    # With one row for each quantity: what has another shape there has a client axis.
    samples = (problem.upper_samples, problem.lower_samples)
    bare = Bilevel(problem.upper, problem.lower, upper_set, lower_set, *samples)
    least = shapes(bare, rows(x, 1), rows(y, 1))
    common = jax.tree.leaves(common_parts(solver, problem, full))
    axis = [a.shape != b.shape for a, b in _pairs(full, least)]
    kept_once = tuple(a and b for a, b in zip(common, axis, strict=True))
    present = clients
    if has_cohorts(solver, problem, full):
        present = problem.lower_set.present(clients)
    everyone = present < clients or problem.fully_federated
    # Estimators remember what each client's own derivatives were.
    each = solver.upper.needs_each(full.upper) or full.estimates is not None
    single = bool(clients > 1 and everyone and kept_once[0] and not each)
    wide = kept_once
    if single:
        inside = shapes(_single(problem, clients), rows(x, 1), y)
        wide = tuple(
            once and a.shape == b.shape
            for once, (a, b) in zip(kept_once, _pairs(full, inside), strict=True)
        )
    narrow = jax.tree.leaves(_one_row_is_enough(full, moves=single))
    wide = tuple(a and not b for a, b in zip(wide, narrow, strict=True))
    return Keeping(
        clients=clients,
        present=present,
        shapes=tuple(leaf.shape for leaf in jax.tree.leaves(full)),
        once=kept_once,
        wide=wide,
        own=tuple(a and not b for a, b in zip(axis, kept_once, strict=True)),
        single=single,
    )


def _one_row_is_enough(state: State, *, moves: bool) -> State:
    """True for what an outer step needs one row of, if all clients have the same.

    That is what the watch keeps of y, and the last move of y where f takes one row for all
    (`moves`).
    """
    mask = jax.tree.map(lambda _: False, state)
    points = ("window_y", "block_y")
    marked = {n: jax.tree.map(lambda _: True, getattr(state.watch, n)) for n in points}
    mask = dataclasses.replace(mask, watch=dataclasses.replace(mask.watch, **marked))
    if state.moves is None or not moves:
        return mask
    moved_x, moved_y = mask.moves
    return dataclasses.replace(mask, moves=(moved_x, jax.tree.map(lambda _: True, moved_y)))


def _pairs(first: PyTree, second: PyTree) -> list[tuple[Any, Any]]:
    return list(zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
