"""An outer step whose clients are spread over the devices of a mesh.

Each device runs the step on its own clients, and the sets' sums go over the devices. So what is
sent in a compiled step is what a round sends, and nothing else.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod.algorithms._keeping import CLIENTS, Keeping
from aipod.algorithms._state import State
from aipod.problem import Bilevel

Step = Callable[[Bilevel, State, PRNGKeyArray], State]


def spread_step(
    step: Step,
    keeping: Keeping,
    problem: Bilevel,
    state: State,
    key: PRNGKeyArray,
    chosen: Array | None,
) -> State:
    """One outer step on a mesh.

    `problem` and `state` are placed as `placed` and `placed_state` do.
    """
    inside, working = problem, state
    if chosen is not None:
        filled = _fill(chosen, keeping.rows(keeping.present))
        inside = problem.take(filled, keeping.clients, keeping.present, CLIENTS)
        working = keeping.taken(state, filled)
    arrays, static = eqx.partition(inside, eqx.is_array)
    mask = jax.tree.leaves(eqx.filter(inside.by_client(), jax.tree.map(eqx.is_array, inside)))
    states = keeping.by_leaf(lambda _, own: _spec(own), working)
    local_rows = keeping.rows(keeping.present) // keeping.devices

    def local(leaves: list[Array], state: State, key: PRNGKeyArray) -> State:
        found = jax.tree.unflatten(jax.tree.structure(arrays), leaves)
        mine = keeping.narrowed(eqx.combine(found, static))
        return keeping.narrow(step(mine, keeping.widened(state, local_rows), key))

    spread = jax.shard_map(
        local,
        mesh=keeping.mesh,
        in_specs=([_spec(rows) for rows in mask], states, PartitionSpec()),
        out_specs=states,
        check_vma=False,
    )
    new = spread(jax.tree.leaves(arrays), working, key)
    return keeping.put_back(new, state, chosen)


def _fill(chosen: Array, rows: int) -> Array:
    """The chosen clients, and the first of them again until there are so many rows."""
    return jnp.concatenate([chosen, jnp.repeat(chosen[:1], rows - chosen.shape[0])])


def placed(problem: Bilevel, keeping: Keeping) -> Bilevel:
    """The problem with its clients spread over the mesh."""
    if not keeping.some:
        everyone = _fill(jnp.arange(keeping.clients), keeping.rows(keeping.clients))
        problem = problem.take(everyone, keeping.clients, keeping.clients, CLIENTS)
    return _put(problem, problem.by_client(), keeping)


def placed_state(state: State, keeping: Keeping) -> State:
    """A kept state with the rows of the clients spread over the mesh, and the rest on all of it."""
    return _put(state, keeping.by_leaf(lambda _, own: own, state), keeping)


def unplaced_state(state: State, keeping: Keeping) -> State:
    """The state without the rows that fill up the mesh."""
    return keeping.by_leaf(lambda leaf, own: leaf[: keeping.clients] if own else leaf, state)


def _spec(by_client: bool) -> PartitionSpec:
    return PartitionSpec(CLIENTS) if by_client else PartitionSpec()


def _put(tree: PyTree, by_client: PyTree, keeping: Keeping) -> Any:
    """The arrays on the mesh, those with a row for each client filled up and spread over it."""
    mesh = keeping.mesh
    if mesh is None:
        return tree

    def one(leaf: Any, spread: bool) -> Any:
        if not eqx.is_array(leaf):
            return leaf
        if spread and (missing := keeping.rows(leaf.shape[0]) - leaf.shape[0]):
            more = jnp.broadcast_to(leaf[:1], (missing, *leaf.shape[1:]))
            leaf = jnp.concatenate([leaf, more])
        return jax.device_put(leaf, NamedSharding(mesh, _spec(spread)))

    return jax.tree.map(one, tree, by_client)
