"""One client's part of an outer step: the simulation's step on a problem with one client."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod import federated
from aipod.algorithms import Alternating, State
from aipod.flower._draws import OwnRow
from aipod.flower._mailbox import ABSENT, TABLES, UNKNOWN, Mailbox, Table, Tables, empty_tables
from aipod.flower._within import Within, connected, empty_problem
from aipod.problem import Bilevel, ClientMinibatches, Objective, in_order, rebuilt
from aipod.sets import AbstractSet


@dataclasses.dataclass(frozen=True)
class Client:
    """What a client brings: its losses, its data, and its place among the clients.

    **Arguments:**

    - `upper`, `lower`: the losses, (x, y, batch) -> scalar, as for `aipod.federated.federate`.
    - `upper_data`, `lower_data`: its own data, pytrees of arrays with the examples on the leading
        axis. They never leave the client.
    - `batch_size`: examples in a batch; None for all, every time.
    - `index`, `clients`: which client this is, counted from 0, and how many there are.
    - `x`, `y`: any points with the structure of x and y; the server sends the starting point.
    - `weight`: how much it counts in every average; only ratios matter.
    - `upper_set`, `lower_set`: sets that x and y must lie in, the same for all clients and in the
        server's `Start`. Every client projects the averages, so nothing more is sent for them.
    - `epochs`: visit every example once before the next time, as `aipod.Minibatches` does; the
        client counts its draws in its own state.

    !!! example
        ```python
        client = aipod.flower.Client(
            f, g, val, train, batch_size=32, x=jnp.zeros(9), y=jnp.zeros(4), index=0, clients=3
        )
        ```
    """

    upper: Objective
    lower: Objective
    upper_data: PyTree
    lower_data: PyTree
    batch_size: int | None
    x: PyTree
    y: PyTree
    index: int
    clients: int
    weight: float = 1.0
    upper_set: AbstractSet | None = None
    lower_set: AbstractSet | None = None
    epochs: bool = False

    def __post_init__(self) -> None:
        for name in ("index", "clients"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ValueError(f"Client: {name} must be a whole number, got {value!r}.")
        if not 0 <= self.index < self.clients:
            raise ValueError(
                f"Client: index must be at least 0 and below clients, which is {self.clients}, got "
                f"{self.index}: give each node its own partition-id, counted from 0."
            )
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"Client: weight must be positive and finite, got {self.weight}.")

    def problem(self) -> Bilevel:
        """The problem of this client alone; it draws the examples of the simulation."""
        alone = federated.federate(
            self.upper,
            self.lower,
            [jax.tree.map(np.asarray, self.upper_data)],
            [jax.tree.map(np.asarray, self.lower_data)],
            batch_size=self.batch_size,
            upper_set=self.upper_set,
            lower_set=self.lower_set,
            epochs=self.epochs,
        )
        both: tuple[Any, Any] = (alone.upper_samples, alone.lower_samples)
        own = [OwnRow.of(samples, int(self.index), int(self.clients)) for samples in both]
        return dataclasses.replace(alone, upper_samples=own[0], lower_samples=own[1])

    @property
    def within(self) -> Within:
        return self.upper_set, self.lower_set


def client_of(problem: Bilevel, x0: PyTree, y0: PyTree, index: int) -> Client:
    """One client of a simulated federation, with the data of that client only.

    For trying out, and for comparing a deployment with its simulation.

    **Arguments:**

    - `problem`: what `aipod.federated.federate` returned.
    - `x0`, `y0`: points with a client axis, as for `aipod.solve`.
    - `index`: which client, counted from 0.

    !!! example
        ```python
        client = aipod.flower.client_of(problem, x0, y0, index=0)
        ```
    """
    if problem.lower_set.apart:
        raise ValueError(
            "Flower has a server, and gossip has none: use aipod.Consensus, that is federate "
            "without graph=, or simulate with aipod.solve."
        )
    if not problem.fully_federated:
        raise ValueError("client_of takes a problem of aipod.federated.federate, with everyone in.")
    samples: tuple[Any, Any] = (problem.upper_samples, problem.lower_samples)
    if not all(hasattr(source, "batch") for source in samples):
        raise ValueError(
            "client_of takes the data that federate has put on the device: leave on_host out of "
            "federate(...)."
        )
    consensus: Any = problem.lower_set.agreement or problem.lower_set
    clients = samples[0].clients
    if not 0 <= index < clients:
        raise ValueError(f"index must be at least 0 and below {clients}, got {index}.")

    def own(source: ClientMinibatches) -> PyTree:
        count = source.pool if source.counts is None else int(source.counts[index])
        return jax.tree.map(lambda leaf: leaf[index, :count], source.batch.data)

    weights = consensus.weights
    x, y = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in (x0, y0))
    return Client(
        _unsummed(problem.upper),
        _unsummed(problem.lower),
        own(samples[0]),
        own(samples[1]),
        samples[0].per_client,
        x,
        y,
        index,
        clients,
        1.0 if weights is None else float(weights[index]),
        upper_set=_within(problem.upper_set),
        lower_set=_within(problem.lower_set),
        epochs=in_order(samples[0]),
    )


def _within(one: AbstractSet) -> AbstractSet | None:
    return one.of_one if one.agreement else None


def _unsummed(objective: Any) -> Objective:
    """The loss of one client, from the sum over clients."""
    return rebuilt(
        objective,
        lambda summed: summed.loss,
        lambda features: features.features,
        lambda head: head.head,
    )


def initial_state(
    solver: Alternating, x0: PyTree, y0: PyTree, within: Within = (None, None)
) -> State:
    """A client's state before the first step, without what it keeps of its own data.

    The server can compute it without any data.
    """
    solver = dataclasses.replace(solver, estimator=None)
    return solver.init(empty_problem(within), *(federated.replicate(tree, 1) for tree in (x0, y0)))


@eqx.filter_jit
def attempt(
    solver: Alternating,
    problem: Bilevel,
    state: State,
    key: PRNGKeyArray,
    answers: Tables,
    robust: bool = False,
) -> tuple[State, Tables, dict[str, Array]]:
    """One outer step with the answers so far: the state after it, and what it asked for."""
    mailbox = Mailbox(answers, robust, bare=solver.wire is not None)
    state = solver.traced_step(connected(problem, mailbox), state, key)
    return state, *mailbox.questions()


class Worker:
    """A client's solver and problem; its tables grow when a step asks for more than they hold.

    `robust`: whether the server averages robustly; clients then send points without corrections.
    """

    def __init__(self, solver: Alternating, problem: Bilevel, state: State) -> None:
        self.solver, self.problem = solver, problem
        self._x, self._y = jax.tree.map(lambda leaf: leaf[0], (state.x, state.y))
        self.rows = [2, 8, 8]
        self.robust = False

    def no_answers(self) -> Tables:
        return empty_tables(self._x, self._y, self.rows)

    def attempt(
        self, state: State, key: PRNGKeyArray, answers: Tables
    ) -> tuple[State, Tables, dict[str, int], Tables]:
        """The state after the step, its questions, how many of each, and the given answers.

        The answers are returned in tables that are long enough for all questions.
        """
        while True:
            answers = self._fitted(answers)
            new, asked, used = attempt(self.solver, self.problem, state, key, answers, self.robust)
            counts = {name: int(used[name]) for name in TABLES}
            if all(counts[name] < rows for name, rows in zip(TABLES, self.rows, strict=True)):
                return new, asked, counts, answers
            self.rows = [
                max(rows, 1 << (counts[name]).bit_length())
                for name, rows in zip(TABLES, self.rows, strict=True)
            ]

    def _fitted(self, answers: Tables) -> Tables:
        fresh = self.no_answers()
        for name, table in answers.items():
            count = len(table.words)
            if count > len(fresh[name].words):
                self.rows[TABLES.index(name)] = count
                return self._fitted(answers)
            fresh[name].values[:count] = table.values
            fresh[name].words[:count] = table.words
        return fresh


def complete(used: dict[str, int], answers: Tables) -> bool:
    """Whether every question of the step has its answer."""
    return all((answers[name].words[: used[name]] != UNKNOWN).all() for name in TABLES)


def without_the_rest(answers: Tables) -> Tables:
    """The answers of a client that took no further part in the step."""
    return {
        name: Table(table.values, np.where(table.words == UNKNOWN, ABSENT, table.words))
        for name, table in answers.items()
    }
