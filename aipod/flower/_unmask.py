"""Secure sums on the server's side: it leads the three messages of a round, and removes masks."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from aipod.flower import _masks
from aipod.flower._exchange import Exchanges, Read
from aipod.flower._masks import LARGEST, LETTER, SHARE, as_words
from aipod.flower._parcel import Parcel
from aipod.flower._progress import DivergedError, Progress, Terms
from aipod.flower._reply import Expected, read_words
from aipod.flower._requests import of_sum
from aipod.flower._roll import Roll
from aipod.flower._sums import needed_shares

Vectors = Mapping[str, np.ndarray]


def total(
    run: str,
    number: int,
    keys: Mapping[int, bytes],
    masked: Mapping[int, Vectors],
    shares: Mapping[int, Mapping[int, bytes]],
) -> dict[str, np.ndarray]:
    """The sum of the vectors that have arrived; `ValueError` when masks cannot be removed.

    **Arguments:**

    - `keys`: the public key of each client that began the round.
    - `masked`: the vectors that have arrived, as 64-bit numbers, by client and name.
    - `shares`: by client, its shares of the secrets of the others: of the own mask of those that
        have arrived, of the key of those that have not.
    """
    first = next(iter(masked.values()))
    names, sizes = sorted(first), [first[name].size for name in sorted(first)]
    flat = {
        index: np.concatenate([vectors[name] for name in names]).view(np.uint64)
        for index, vectors in masked.items()
    }
    size = sum(sizes)
    found: Any = np.sum(list(flat.values()), axis=0, dtype=np.uint64)
    for index in keys:
        pieces = {giver: given[index] for giver, given in shares.items() if index in given}
        secret = _masks.joined(pieces)
        if index in masked:
            found = found - _masks.mask(_masks.own_key(secret), size)
            continue
        # It has gone after the others had added the masks that they share with it.
        gone = _masks.key_of(secret)
        if _masks.public_of(gone) != keys[index]:
            raise ValueError(f"shares of the key of client {index} do not belong together.")
        for other in masked:
            one = _masks.mask(_masks.agreed(gone, keys[other], f"mask {run} {number}"), size)
            found = found - one if other < index else found + one
    decoded = _masks.decoded(found)
    ends = np.cumsum(sizes)
    return dict(zip(names, np.split(decoded, ends[:-1]), strict=True))


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
        masked = self._ask(
            number, "mask", to_each, lambda _, parcel: self._expected.masked(parcel, names)
        )
        if len(masked) < max(enough, self._roll.needed):
            return None
        shares = self._shares(number, keys, set(masked))
        if len(shares) < enough:
            return None
        found = total(self._progress.run, number, keys, masked, shares)
        if any(np.abs(value).max(initial=0) > len(masked) * LARGEST for value in found.values()):
            raise DivergedError(
                "a secure sum is larger than all of its parts: a client has sent a vector that "
                "does not belong to the round. Masks hide which one it was."
            )
        return {
            name.rpartition(".")[0]: (value / len(masked)).astype(self._expected.of_row(name))
            for name, value in found.items()
        }, set(masked)

    def _shares(
        self, number: int, keys: Mapping[int, bytes], arrived: set[int]
    ) -> dict[int, dict[int, bytes]]:
        wanted = {f"share:{index}": SHARE // 4 for index in keys}
        text = ",".join(map(str, sorted(arrived)))

        def read(_: int, parcel: Parcel) -> dict[int, bytes]:
            found = read_words(parcel, wanted)
            return {int(name.partition(":")[2]): share for name, share in found.items()}

        return self._ask(number, "shares", {index: {} for index in arrived}, read, arrived=text)

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
    """Reads a client's first message: a key, and a letter to each of the others."""

    def read(index: int, parcel: Parcel) -> dict[str, bytes]:
        wanted = {f"seal:{other}": LETTER // 4 for other in peers if other != index}
        return read_words(parcel, {"seal:key": 8} | wanted)

    return read
