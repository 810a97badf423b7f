"""What a set answers about clients: who takes part in a projection, and what is sent for it."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, PyTree


class AbstractClients(eqx.Module):
    """The answers of a set without clients; sets of clients override them.

    A projection of a federated set is a communication round. `AbstractSet.for_round` gives the
    set as one such round sees it, in which some of the clients may be absent.
    """

    @property
    def federated(self) -> bool:
        """Whether a projection needs all clients, and so is a communication round."""
        return False

    @property
    def per_client(self) -> bool:
        """Whether the leading axis of every leaf of a point is the client axis."""
        return False

    @property
    def together(self) -> bool:
        """Whether a projection gives all clients the same point."""
        return False

    @property
    def everyone(self) -> bool:
        """Whether a projection is agreement between all clients, in every round."""
        return False

    @property
    def averages(self) -> bool:
        """Whether all clients end a round with the mean of what all of them have."""
        return False

    @property
    def cohorts(self) -> bool:
        """Whether each outer step, with all its rounds, is made by some of the clients."""
        return False

    @property
    def apart(self) -> tuple[int, ...]:
        """The shape of a number that clients find together: () where all have the same.

        (M,) where there is no server, and each of M clients has its own, also of x, y and the step
        sizes. Then `largest` and `summed` are of a client's own numbers, unless it hears everyone.
        """
        return ()

    def pass_on(self, v: PyTree, key: PRNGKeyArray) -> PyTree:
        """v after each client has handed its own to another client, who is chosen with the key.

        Every client gets exactly one, from a client that is uniformly random.
        """
        return v

    def heard(self, values: Array) -> Array:
        """The largest that clients know after a round of a number that each of them keeps."""
        return values

    def largest(self, values: Array) -> Array:
        """The largest of some numbers; with `per_client`, one number for each client."""
        return jnp.max(values)

    def summed(self, values: Array) -> Array:
        """The sum of such numbers."""
        return jnp.sum(values)

    def present(self, clients: int) -> int:
        """How many of the clients take part in a round, or in an outer step."""
        return clients

    def members_in_all(self, rows: int) -> int:
        """How many clients there are, of whom so many are on this device."""
        return rows

    def keep_absent(self, new: PyTree, old: PyTree) -> PyTree:
        """`new`, with `old` for the clients that took no part in the round."""
        return new

    def check_corrections(self, y: PyTree, *, name: str = "set") -> None:
        """Raises `ValueError` where corrections, such as ProxSkip's, could never change."""

    def message_size(self, y: PyTree) -> int:
        """The bytes of y that one client sends for a projection; 0 where nothing is sent."""
        return 0

    def link_size(self, y: PyTree) -> int:
        """The bytes of y that cross one link of a graph in a round; 0 where there is no graph."""
        return 0

    @property
    def messages(self) -> int:
        """The messages of a round that cross links of a graph; 0 where there is no graph."""
        return 0
