"""Where the arrays of a run live: on one device, or spread over a mesh of them."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from aipod.algorithms import CLIENTS, Keeping, State, placed, placed_state, unplaced_state
from aipod.problem import Bilevel, spread_batches
from aipod.solving._processes import here

_BATCH = "batch"


@dataclasses.dataclass(frozen=True)
class Placement:
    """The problem and the state of a run as its compiled chunks get them.

    - `problem`: the problem, where it is to be computed.
    - `keeping`: how the state of a federation is kept.
    - `mesh`: the devices; None where the arrays stay where they are.
    - `rows`: where clients gossip, how many there are: arrays with so many rows are spread.
    """

    problem: Bilevel
    keeping: Keeping | None
    mesh: Mesh | None = None
    rows: int | None = None

    @staticmethod
    def of(problem: Bilevel, keeping: Keeping | None, mesh: Any) -> "Placement":
        """Raises `ValueError` when a mesh does not fit the problem."""
        if mesh is None:
            return Placement(problem, keeping, mesh_of(problem))
        if not isinstance(mesh, Mesh):
            raise ValueError(
                "mesh must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ('clients',)), got "
                f"{type(mesh).__name__}."
            )
        mesh = _automatic(mesh)
        if CLIENTS in mesh.axis_names and problem.lower_set.apart and problem.divisible:
            (rows,) = problem.lower_set.apart
            if rows % mesh.shape[CLIENTS]:
                raise ValueError(
                    f"mesh: {rows} clients that gossip cannot be dealt evenly to "
                    f"{mesh.shape[CLIENTS]} devices: take a number of devices that divides {rows}."
                )
            # XLA makes the messages: those of shifts of the client axis are collective permutes.
            return Placement(_in_rows(problem, problem.by_client(), mesh), None, mesh, rows)
        if CLIENTS in mesh.axis_names:
            if keeping is None or not problem.divisible:
                raise ValueError(
                    "mesh has an axis 'clients', but this problem has no clients that can be "
                    "spread: make it with aipod.federated.federate, or name the axis 'batch'."
                )
            keeping = dataclasses.replace(keeping, mesh=mesh)
            return Placement(placed(problem, keeping), keeping, mesh)
        if _BATCH in mesh.axis_names:
            if keeping is not None:
                raise ValueError("mesh: the clients of a federation need an axis named 'clients'.")
            problem, sharding = _on(problem, mesh), NamedSharding(mesh, PartitionSpec(_BATCH))
            problem = dataclasses.replace(
                problem,
                upper_samples=spread_batches(problem.upper_samples, sharding),
                lower_samples=spread_batches(problem.lower_samples, sharding),
            )
            return Placement(problem, None, mesh)
        raise ValueError(
            "mesh must have an axis 'clients', for a federation, or 'batch', for the examples of "
            f"each batch; it has {mesh.axis_names}."
        )

    def place(self, state: State) -> State:
        """A state as it is kept on one device, where the run keeps it."""
        if self.mesh is None:
            return state
        if self.keeping is not None and self.keeping.mesh is not None:
            return placed_state(state, self.keeping)
        if self.rows is not None:
            rows = self.rows
            spread = jax.tree.map(lambda leaf: leaf.ndim > 0 and leaf.shape[0] == rows, state)
            return _in_rows(state, spread, self.mesh)
        return _on(state, self.mesh)

    def collect(self, state: State) -> State:
        """The same without what fills up the mesh."""
        state = here(state)
        if self.keeping is None or self.keeping.mesh is None:
            return state
        return unplaced_state(state, self.keeping)


def _in_rows(tree: PyTree, by_client: PyTree, mesh: Mesh) -> Any:
    """The arrays on a mesh, those with a row for each client spread over it."""

    def one(leaf: Any, spread: bool) -> Any:
        if not eqx.is_array(leaf):
            return leaf
        spec = PartitionSpec(CLIENTS) if spread else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(one, tree, by_client)


def _automatic(mesh: Mesh) -> Mesh:
    """The same devices, with shardings that XLA propagates; `jax.make_mesh` makes another kind."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def adopted(problem: Bilevel) -> Bilevel:
    """A problem whose data the user has spread over devices, in the way that XLA propagates."""
    mesh = mesh_of(problem)
    return problem if mesh is None else _on(problem, mesh)


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh over which the user has spread some array of a tree; None where there is none."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or len(sharding.device_set) == 1:
            continue
        if isinstance(sharding.mesh, Mesh):
            return _automatic(sharding.mesh)
    return None


def _on(tree: PyTree, mesh: Mesh) -> Any:
    """The arrays on the devices of a mesh: spread as they are, else on every one."""

    def one(leaf: Any) -> Any:
        if not eqx.is_array(leaf):
            return leaf
        sharding = leaf.sharding
        spec = PartitionSpec()
        if isinstance(sharding, NamedSharding) and len(sharding.device_set) > 1:
            spec = sharding.spec
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(one, tree)
