"""Secure sums on the server's side: it leads the three messages of a round, and removes masks."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aipod.flower import _masks
from aipod.flower._exchange import Exchanges, Read
from aipod.flower._masks import LARGEST, LETTER, SHARE, as_words
from aipod.flower._parcel import Parcel
from aipod.flower._progress import DivergedError, NotEnoughClientsError, Progress, Terms
from aipod.flower._reply import BadReplyError, Expected, Masked, read_words
from aipod.flower._requests import of_sum
from aipod.flower._roll import Roll
from aipod.flower._shares import recovered
from aipod.flower._sums import needed_shares

Vectors = Mapping[str, np.ndarray]
# How many sums a client may spoil before it is refused.
_OFFENCES = 3


@dataclasses.dataclass(frozen=True)
class Begun:
    """What the clients of a round have shown of their secrets when it began.

    - `keys`: the public key of each for this round.
    - `owns`: the commitment of each to the secret of its own mask.
    - `needed`: how many shares give a secret back.
    """

    keys: Mapping[int, bytes]
    owns: Mapping[int, bytes]
    needed: int

    def secret(
        self, index: int, own: bool, pieces: Mapping[int, bytes]
    ) -> tuple[bytes, set[int]] | None:
        """One of a client's two secrets, and who gave a wrong share of it; None if it is lost."""

        def right(made: bytes) -> bool:
            if own:
                return _masks.commitment(made) == self.owns[index]
            return _masks.public_of(_masks.key_of(made)) == self.keys[index]

        return recovered(pieces, self.needed, right)


@dataclasses.dataclass(frozen=True)
class Summed:
    """What came out of a round.

    - `total`: the sum of the vectors that have arrived; nothing where masks could not be removed.
    - `wrong`: the clients whose shares of the secrets of others were wrong.
    - `lost`: the clients of which a secret could not be found.
    """

    total: Mapping[str, np.ndarray]
    wrong: set[int]
    lost: set[int]


def unmasked(
    run: str,
    number: int,
    begun: Begun,
    masked: Mapping[int, Vectors],
    shares: Mapping[int, Mapping[int, bytes]],
) -> Summed:
    """The sum of the vectors that have arrived.

    **Arguments:**

    - `masked`: the vectors that have arrived, as 64-bit numbers, by client and name.
    - `shares`: by client, its shares of the secrets of the others: of the own mask of those that
        have arrived, of the key of those that have not.
    """
    secrets, wrong, lost = dict[int, bytes](), set[int](), set[int]()
    for index in begun.keys:
        pieces = {giver: given[index] for giver, given in shares.items() if index in given}
        recovered = begun.secret(index, index in masked, pieces)
        if recovered is None:
            lost.add(index)
            continue
        secrets[index] = recovered[0]
        wrong |= recovered[1]
    if lost:
        return Summed({}, wrong, lost)
    first = next(iter(masked.values()))
    names, sizes = sorted(first), [first[name].size for name in sorted(first)]
    size = sum(sizes)
    flat = [
        np.concatenate([vectors[name] for name in names]).view(np.uint64)
        for vectors in masked.values()
    ]
    found: Any = np.sum(flat, axis=0, dtype=np.uint64)
    for index, secret in secrets.items():
        if index in masked:
            found = found - _masks.mask(_masks.own_key(secret), size)
            continue
        # It has gone after the others had added the masks that they share with it.
        gone = _masks.key_of(secret)
        for other in masked:
            one = _masks.mask(_masks.agreed(gone, begun.keys[other], f"mask {run} {number}"), size)
            found = found - one if other < index else found + one
    parts = np.split(_masks.decoded(found), np.cumsum(sizes)[:-1])
    return Summed(dict(zip(names, parts, strict=True)), wrong, lost)


class SecureRounds:
    """Leads secure sums: letters, masked vectors, and the shares that remove masks."""

    def __init__(
        self,
        exchanges: Exchanges,
        roll: Roll,
        terms: Terms,
        progress: Progress,
        expected: Expected,
    ) -> None:
        self._exchanges, self._roll, self._terms = exchanges, roll, terms
        self._progress, self._expected = progress, expected
        self._last = 0
        self._offences: Counter[int] = Counter()

    def mean(self, asked: Mapping[int, set[str]]) -> tuple[dict[str, np.ndarray], set[int]] | None:
        """The mean by `table.row`, and the clients it is of; None when too many have gone.

        **Arguments:**

        - `asked`: the names of each client's open questions, which are the same for all.
        """
        if len(set(self._progress.weights.values())) > 1:
            raise ValueError(
                "in secure sums all clients count alike: give all of them the same weight, or "
                "leave secure out."
            )
        names, enough = next(iter(asked.values())), needed_shares(len(asked))
        # Never a number again, also after a restart of the server.
        number = self._last = max(self._last + 1, time.time_ns() // 1_000_000)
        peers = {index: self._roll.keys[index] for index in asked}
        arrays = {f"peer:{index}": as_words(key) for index, key in peers.items()}
        sealed = self._ask(number, "seal", dict.fromkeys(peers, arrays), _letters(peers))
        if len(sealed) < max(enough, self._roll.needed):
            return None
        keys = {index: found["seal:key"] for index, found in sealed.items()}
        public = {f"key:{index}": as_words(key) for index, key in keys.items()}
        to_each = {
            index: public
            | {f"seal:{i}": as_words(s[f"seal:{index}"]) for i, s in sealed.items() if i != index}
            for index in keys
        }
        masked = self._vectors(number, to_each, names, len(peers))
        if masked is None or len(masked) < max(enough, self._roll.needed):
            return None
        shares = self._shares(number, keys, masked)
        if len(shares) < enough:
            return None
        owns = {index: sent["seal:own"] for index, sent in sealed.items()}
        begun = Begun(keys, owns, enough)
        vectors = {index: one.vectors for index, one in masked.items()}
        summed = unmasked(self._progress.run, number, begun, vectors, shares)
        for index in summed.wrong:
            self._exchanges.drop(index, "its shares of the secrets of others are wrong")
        if len(summed.lost) > len(peers) - enough:
            raise NotEnoughClientsError(
                f"a secure sum is lost: the shares of the secrets of clients {sorted(summed.lost)} "
                "do not belong together, so too many clients are damaged or hostile."
            )
        for index in summed.lost:
            self._blame(index, "the shares of its secrets do not belong together")
        if summed.lost:
            return None
        if any(
            np.abs(value).max(initial=0) > len(masked) * LARGEST for value in summed.total.values()
        ):
            raise DivergedError(
                "a secure sum is larger than all of its parts: a client has sent a vector that "
                "does not belong to the round. Masks hide which one it was."
            )
        return {
            name.rpartition(".")[0]: (value / len(masked)).astype(self._expected.of_row(name))
            for name, value in summed.total.items()
        }, set(masked)

    def _vectors(
        self, number: int, to_each: Mapping[int, Vectors], names: set[str], clients: int
    ) -> dict[int, Masked] | None:
        """The masked vectors that have arrived; None when the sum must begin anew without somebody.

        Only two clients can say whether the letter of one to the other is as it should be, and
        either may lie. So a client has to go when more of the others cannot open its letters than
        may be hostile, and never because of fewer: those go on without its letter, or are absent
        themselves where that leaves them too few.
        """

        def read(index: int, parcel: Parcel) -> Masked:
            return self._expected.masked(parcel, names, set(to_each) - {index})

        found = self._ask(number, "mask", to_each, read)
        closed = {one: sorted(i for i, m in found.items() if one in m.closed) for one in to_each}
        for one, to in closed.items():
            if to:
                self._exchanges.say(f"clients {to} cannot open the letters of client {one}")
        enough = needed_shares(clients)
        guilty = [one for one, to in closed.items() if len(to) > clients - enough]
        for one in guilty:
            self._blame(one, f"clients {closed[one]} cannot open its letters")
        if guilty:
            return None
        for index, said in list(found.items()):
            if not said.vectors:
                del found[index]
                self._exchanges.drop(index, f"it cannot open letters of {sorted(said.closed)}")
        # Of every client enough others must have a share of its secrets.
        lost = {one for one, to in closed.items() if len(set(found) - set(to)) < enough}
        for one in lost & set(self._roll.members):
            self._exchanges.drop(one, "too few clients are left that can open its letters")
        return None if lost else found

    def _blame(self, index: int, reason: str) -> None:
        """The client is absent; who spoils sums again and again is refused.

        A sum that begins anew costs time, and with privacy a part of every client's budget.
        """
        self._offences[index] += 1
        if index not in self._roll.members:
            return
        if self._offences[index] >= _OFFENCES:
            self._roll.bar(index, f"it has spoilt {_OFFENCES} secure sums: {reason}")
        self._exchanges.drop(index, reason)

    def _shares(
        self, number: int, keys: Mapping[int, bytes], masked: Mapping[int, Masked]
    ) -> dict[int, dict[int, bytes]]:
        text = ",".join(map(str, sorted(masked)))

        def read(giver: int, parcel: Parcel) -> dict[int, bytes]:
            held = set(keys) - masked[giver].closed
            found = read_words(parcel, {f"share:{index}": SHARE // 4 for index in held})
            return {int(name.partition(":")[2]): share for name, share in found.items()}

        return self._ask(number, "shares", {index: {} for index in masked}, read, arrived=text)

    def _ask(
        self,
        number: int,
        phase: str,
        arrays: Mapping[int, Mapping[str, np.ndarray]],
        read: Callable[[int, Parcel], Read],
        **words: str,
    ) -> dict[int, Read]:
        parcels = {}
        for index, own in arrays.items():
            made = of_sum(self._terms, self._progress, number, phase, own)
            parcels[index] = Parcel({**made.words, **words}, made.arrays)
        return self._exchanges.ask(parcels, read)


def _letters(peers: Mapping[int, bytes]) -> Callable[[int, Parcel], dict[str, bytes]]:
    """Reads a client's first message: a key, a commitment, and letters to the others."""

    def read(index: int, parcel: Parcel) -> dict[str, bytes]:
        wanted = {f"seal:{other}": LETTER // 4 for other in peers if other != index}
        found = read_words(parcel, {"seal:key": 8, "seal:own": 8} | wanted)
        if not _masks.usable(found["seal:key"]):
            raise BadReplyError("nobody can agree on anything with its key")
        return found

    return read
