"""The questions of one client in an outer step, and the answers it has so far.

A client runs the simulation's own step on a problem with one client, itself. Where the simulation
averages over clients, the client writes its value down as a question. If the answer is known, the
step goes on with the answer; if not, it goes on with NaN. Whatever depends on a missing answer is
then NaN, and only questions without NaN are ready to be sent. When answers arrive, the outer step
is made again from its beginning. So the step stays one compiled function,

    (state at its start, key, answers so far)  ->  (state at its end, questions),

and between two messages a client keeps only the state and the answers.

The questions of an outer step are numbered in the order in which the step asks them. That order
follows from the shared key, and is therefore the same for all clients.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PRNGKeyArray, PyTree

from aipod._misc.tree import axpy
from aipod.sets import AbstractSet
from aipod.sets._agreement import AbstractAgreement, AbstractRound, bytes_of_one_client

# What is known of an answer.
UNKNOWN, KNOWN, ABSENT = 0, 1, 2
# How the server combines the clients' values.
POINT, DIRECTION, LARGEST, TOTAL, WEIGHTED = 1, 2, 3, 4, 5
# The rows of a table: vectors like x, vectors like y, and numbers.
TABLES = ("x", "y", "number")


class Table(eqx.Module):
    """Rows of one length: values, and one word for each row.

    In answers the word is `UNKNOWN`, `KNOWN` or `ABSENT` (the round went on without this client).
    In questions it says how to combine the values of the clients, from `POINT` to `WEIGHTED`.
    """

    values: Any
    words: Any

    @staticmethod
    def empty(rows: int, size: int, dtype: Any) -> "Table":
        return Table(np.zeros((rows, size), dtype), np.zeros(rows, np.int32))


Tables = dict[str, Table]


def empty_tables(x: PyTree, y: PyTree, rows: Sequence[int]) -> Tables:
    """Tables without answers, for one client's x and y."""
    flat = {"x": ravel_pytree(x)[0], "y": ravel_pytree(y)[0]}
    flat["number"] = jnp.zeros(1, flat["y"].dtype)
    return {
        name: Table.empty(count, flat[name].size, flat[name].dtype)
        for name, count in zip(TABLES, rows, strict=True)
    }


class _Rows(eqx.Module):
    """A table of answers with the questions beside it, during one outer step."""

    answers: Table
    asked: Any
    kinds: Any
    used: Any

    def ask(self, value: Array, kind: int, own: Array | None = None) -> Array:
        """The answer to a question; `own` is what an absent client has in place of it."""
        count = self.used[...]
        # Beyond the last row: `used` shows it, and the step is made again with a longer table.
        row = jnp.minimum(count, self.kinds.shape[0] - 1)
        self.asked[row] = value
        self.kinds[row] = jnp.asarray(kind, jnp.int32)
        self.used[...] = count + 1
        word = self.answers.words[row]
        # An absent client keeps its own value, so that its correction does not change.
        known = jnp.where(word == KNOWN, self.answers.values[row], jnp.nan)
        return jnp.where(word == ABSENT, value if own is None else own, known)


class Mailbox:
    """The tables of one outer step while it is traced; questions go into mutable references."""

    def __init__(self, answers: Tables, robust: bool = False, bare: bool = False) -> None:
        self._robust, self._bare = robust, robust or bare
        self._rows = {
            name: _Rows(
                table,
                jax.new_ref(jnp.zeros_like(table.values)),
                jax.new_ref(jnp.zeros_like(table.words)),
                jax.new_ref(jnp.zeros((), jnp.int32)),
            )
            for name, table in answers.items()
        }

    def set_of(self, table: str) -> "Distant":
        """The consensus set for vectors of one table."""
        rows, numbers = self._rows[table], self._rows["number"]
        return Distant(rows, numbers, table, self._robust, self._bare)

    def questions(self) -> tuple[Tables, dict[str, Array]]:
        """What was asked, and how many rows of each table were used."""
        asked = {
            name: Table(jax.freeze(rows.asked), jax.freeze(rows.kinds))
            for name, rows in self._rows.items()
        }
        return asked, {name: jax.freeze(rows.used) for name, rows in self._rows.items()}


class Distant(AbstractAgreement):
    """Agreement between clients that are elsewhere; what `Consensus` is to one client of many.

    Points have a client axis of length 1. With `robust` the server takes another average than the
    mean. With `bare` they are sent without corrections, as `RobustConsensus` does it.
    """

    rows: _Rows
    numbers: _Rows
    table: str = eqx.field(static=True)
    robust: bool = eqx.field(static=True)
    bare: bool = eqx.field(static=True)

    @property
    def averages(self) -> bool:
        return not self.robust

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        if self.table == "x":
            # Outside a round nothing is sent. All clients have computed x from the same answers.
            return y
        raise _not_over_a_network()

    def tangent(self, v: PyTree) -> PyTree:
        raise _not_over_a_network()

    def residual(self, y: PyTree, x: PyTree = None) -> PyTree:
        raise _not_over_a_network()

    def largest(self, values: Array) -> Array:
        return self.numbers.ask(values.astype(self.numbers.asked.dtype), LARGEST)[0]

    def summed(self, values: Array) -> Array:
        # Sums upstairs are of parts of the objective, in which clients have their weights.
        kind = WEIGHTED if self.table == "x" else TOTAL
        return self.numbers.ask(values.astype(self.numbers.asked.dtype), kind)[0]

    def message_size(self, y: PyTree) -> int:
        return bytes_of_one_client(y)

    def for_round(self, key: PRNGKeyArray) -> AbstractSet:
        return _Round(self)


class _Round(AbstractRound):
    """The set during one round: a projection asks the server."""

    base: Distant

    def _ask(self, tree: PyTree, kind: int, own: PyTree = None) -> PyTree:
        flat, restore = ravel_pytree(tree)
        rows = self.base.rows
        mine = None if own is None else ravel_pytree(own)[0].astype(rows.asked.dtype)
        return restore(rows.ask(flat.astype(rows.asked.dtype), kind, mine).astype(flat.dtype))

    def project(self, y: PyTree, x: PyTree = None) -> PyTree:
        return self._ask(y, POINT)

    def project_corrected(self, y: PyTree, correction: PyTree) -> PyTree:
        # A mean may leave corrections out, as they add up to zero; a robust average may not, nor
        # may short messages, which say how far a point has moved.
        if self.base.bare:
            return self._ask(axpy(y, -1, correction), POINT, y)
        return self.project(y)

    def tangent(self, v: PyTree) -> PyTree:
        return self._ask(v, DIRECTION)


def _not_over_a_network() -> ValueError:
    return ValueError(
        "this solver averages outside of its rounds, which cannot be sent over a network: use "
        "aipod.AiPOD, aipod.EAiPOD, aipod.E2AiPOD or aipod.E3AiPOD."
    )


def ready(questions: Tables, used: dict[str, Any], answers: Tables) -> Tables:
    """The questions that have a value and no answer yet; in other rows the word is 0."""
    found = {}
    for name, table in questions.items():
        values, words = np.asarray(table.values), np.array(table.words)
        open_rows = np.arange(len(words)) < int(used[name])
        open_rows &= np.asarray(answers[name].words) == UNKNOWN
        finite = ~np.isnan(values).any(axis=1) if values.size else np.zeros(len(words), bool)
        words[~(open_rows & finite)] = 0
        found[name] = Table(values, words)
    return found
