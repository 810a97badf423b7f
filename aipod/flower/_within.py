"""The sets of a federation over a network: agreement, on a point of another set where given."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from aipod.flower._mailbox import Mailbox
from aipod.problem import Bilevel
from aipod.sets import AbstractSet, AgreedWithin, Consensus

# The sets of one client's x and y; None where they need only be common.
Within = tuple[AbstractSet | None, AbstractSet | None]


def empty_problem(within: Within = (None, None)) -> Bilevel:
    """A federation without data: all that the server knows about the problem."""
    upper_set, lower_set = (
        Consensus() if one is None else AgreedWithin(Consensus(), one) for one in within
    )
    return Bilevel(_nothing, _nothing, upper_set, lower_set)


def _nothing(x: PyTree, y: PyTree, batch: Any) -> Array:
    return jnp.zeros(())


def connected(problem: Bilevel, mailbox: Mailbox) -> Bilevel:
    """A client's problem, in which agreement is asked for in a mailbox."""

    def asking(one: AbstractSet, table: str) -> AbstractSet:
        distant = mailbox.set_of(table)
        return AgreedWithin(distant, one.of_one) if one.agreement else distant

    return dataclasses.replace(
        problem,
        upper_set=asking(problem.upper_set, "x"),
        lower_set=asking(problem.lower_set, "y"),
    )
