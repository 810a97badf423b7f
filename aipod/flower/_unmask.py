"""Secure sums on the server's side: it leads the three messages of a round, and removes masks."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from aipod.flower import _masks
from aipod.flower._exchange import Exchanges, Read
from aipod.flower._masks import LARGEST, LETTER, SHARE, as_words
from aipod.flower._parcel import Parcel
from aipod.flower._progress import DivergedError, NotEnoughClientsError, Progress, Terms
from aipod.flower._reply import BadReplyError, Expected, read_words
from aipod.flower._requests import of_sum
from aipod.flower._roll import Roll
from aipod.flower._sums import needed_shares

Vectors = Mapping[str, np.ndarray]
# How many groups of shares are tried before a secret is given up.
_TRIES = 200


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

    def secret(self, index: int, own: bool, pieces: Mapping[int, bytes]) -> tuple[bytes, set[int]]:
        """One of a client's two secrets, and who gave a wrong share of it."""

        def found(givers: Iterable[int]) -> bytes | None:
            try:
                made = _masks.joined({giver: pieces[giver] for giver in givers})
            except ValueError:
                return None
            if own:
                return made if _masks.commitment(made) == self.owns[index] else None
            return made if _masks.public_of(_masks.key_of(made)) == self.keys[index] else None

        groups = itertools.combinations(sorted(pieces), self.needed)
        for group in itertools.islice(groups, _TRIES):
            if (secret := found(group)) is not None:
                others = set(pieces) - set(group)
                return secret, {one for one in others if found([*group[1:], one]) is None}
        raise ValueError(f"the shares of a secret of client {index} do not belong together")


def total(
    run: str,
    number: int,
    begun: Begun,
    masked: Mapping[int, Vectors],
    shares: Mapping[int, Mapping[int, bytes]],
) -> tuple[dict[str, np.ndarray], set[int]]:
    """The sum of the vectors that have arrived, and the clients whose shares were wrong.

    `ValueError` when masks cannot be removed.

    **Arguments:**

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
    size, wrong = sum(sizes), set[int]()
    found: Any = np.sum(list(flat.values()), axis=0, dtype=np.uint64)
    for index in begun.keys:
        pieces = {giver: given[index] for giver, given in shares.items() if index in given}
        secret, liars = begun.secret(index, index in masked, pieces)
        wrong |= liars
        if index in masked:
            found = found - _masks.mask(_masks.own_key(secret), size)
            continue
        # It has gone after the others had added the masks that they share with it.
        gone = _masks.key_of(secret)
        for other in masked:
            one = _masks.mask(_masks.agreed(gone, begun.keys[other], f"mask {run} {number}"), size)
            found = found - one if other < index else found + one
    decoded = _masks.decoded(found)
    ends = np.cumsum(sizes)
    return dict(zip(names, np.split(decoded, ends[:-1]), strict=True)), wrong


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
        owns = {index: sent["seal:own"] for index, sent in sealed.items()}
        begun = Begun(keys, owns, needed_shares(len(peers)))
        try:
            found, wrong = total(self._progress.run, number, begun, masked, shares)
        except ValueError as error:
            raise NotEnoughClientsError(
                f"a secure sum is lost: {error}, so too many clients are damaged or hostile."
            ) from None
        for index in wrong:
            self._exchanges.drop(index, "its shares of the secrets of others are wrong")
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
    """Reads a client's first message: a key, a commitment, and letters to the others."""

    def read(index: int, parcel: Parcel) -> dict[str, bytes]:
        wanted = {f"seal:{other}": LETTER // 4 for other in peers if other != index}
        found = read_words(parcel, {"seal:key": 8, "seal:own": 8} | wanted)
        if not _masks.usable(found["seal:key"]):
            raise BadReplyError("nobody can agree on anything with its key")
        return found

    return read
