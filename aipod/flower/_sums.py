"""Secure sums on the client's side: the server gets the sum of all vectors, and no vector.

A round has three messages. In the first a client makes two secrets for this round alone, and sends
each of the others its shares of them, sealed. In the second it sends its vectors under masks. In
the third it is told whose vectors have arrived, and gives its shares: of the own masks of those
whose vectors have arrived, and of the keys of the others. It does each of them once.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aipod._misc.files import private_folder, read_private, write_bytes, write_text
from aipod.flower import _masks
from aipod.flower._masks import SHARE, as_bytes, as_words

_log = logging.getLogger("flwr")

# No run can have this name.
FOLDER = ".sums"
_LEAST, _PEERS = "secure-least", "secure-peers"


@dataclasses.dataclass(frozen=True)
class Wish:
    """What a node's owner asks for.

    - `demanded`: whether vectors leave in secure sums only.
    - `least`: how many clients a sum needs; with privacy, how many of them are believed honest.
    - `peers`: the public keys of all clients, as their owners told them; None to believe them.
    """

    demanded: bool = False
    least: int = 3
    peers: Mapping[int, bytes] | None = None

    @staticmethod
    def of(node: Mapping[str, Any]) -> "Wish":
        """From the node configuration; not demanded unless it says something about it."""
        if _LEAST not in node and _PEERS not in node:
            return Wish()
        try:
            least = int(node.get(_LEAST, 3))
        except (TypeError, ValueError):
            least = 0
        if least < 2:
            raise ValueError(
                f"node configuration: {_LEAST} must be a whole number of at least 2, got "
                f"{node[_LEAST]!r}."
            )
        return Wish(True, least, _read_peers(Path(str(node[_PEERS]))) if _PEERS in node else None)


def _read_peers(path: Path) -> dict[int, bytes]:
    """The keys in a file with lines `INDEX KEY`, as `client-N.pub` has them."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line]
        found = {int(index): bytes.fromhex(key) for index, key in lines}
        if any(len(key) != 32 for key in found.values()) or len(found) != len(lines):
            raise ValueError("a key is too short, or a client stands there twice")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{_PEERS}: {path} must hold a line with index and key for each client ({error})."
        ) from None
    return found


def long_key(folder: Path, index: int) -> X25519PrivateKey:
    """The client's own key, which the others know it by; made when it is first needed."""
    private_folder(folder)
    path = private_folder(folder / FOLDER) / f"client-{index}.key"
    if not os.path.lexists(path):
        made = X25519PrivateKey.generate()
        write_bytes(path, made.private_bytes_raw(), private=True)
        line = f"{index} {_masks.public_of(made).hex()}\n"
        write_text(path.with_suffix(".pub"), line, private=True)
    found = read_private(path)
    if len(found) != 32:
        raise ValueError(
            f"the key {path} holds {len(found)} bytes in place of 32: remove it, and tell the "
            "others that this client has a new one."
        )
    return X25519PrivateKey.from_private_bytes(found)


def needed_shares(clients: int) -> int:
    """How many clients can remove masks: more than half, so that no two such groups are apart."""
    return clients // 2 + 1


class Sums:
    """One client's part in the secure sums of one run; what it has done is on its disk."""

    def __init__(
        self, folder: Path, run: str, index: int, key: X25519PrivateKey, wish: Wish
    ) -> None:
        self._path = folder / "sums.json"
        self._run, self._index, self._key = run, index, key
        self._least, self._trusted = wish.least, wish.peers

    @property
    def public(self) -> bytes:
        """The key that the others know this client by."""
        return _masks.public_of(self._key)

    def _read(self) -> dict[str, Any]:
        return json.loads(read_private(self._path)) if os.path.lexists(self._path) else {}

    def _write(self, content: Mapping[str, Any]) -> None:
        write_text(self._path, json.dumps(content), private=True)

    def begin(self, number: int, peers: Mapping[int, bytes]) -> dict[str, np.ndarray]:
        """The first message of a round: a public key for it, and letters to the other clients."""
        kept = self._read()
        if number <= int(kept.get("round", -1)) and kept.get("peers") != _listed(peers):
            raise ValueError(f"round {number} of secure sums began already, with other clients.")
        if number < int(kept.get("round", -1)):
            raise ValueError(f"round {number} of secure sums is over: {kept['round']} has begun.")
        if number == kept.get("round"):
            return {name: as_words(bytes.fromhex(text)) for name, text in kept["sent"].items()}
        if peers.get(self._index) != _masks.public_of(self._key):
            raise ValueError("the server names another key as this client's: it is refused.")
        if len(set(peers.values())) < len(peers):
            raise ValueError("two clients of a secure sum have the same key: it is refused.")
        strange = [i for i in peers if self._trusted and self._trusted.get(i) != peers[i]]
        if strange:
            raise ValueError(
                f"the key of client {strange[0]} is not the one in secure-peers: it is refused."
            )
        if len(peers) < self._least:
            raise ValueError(
                f"a secure sum of {len(peers)} clients, and this one asks for {self._least}: "
                "refused. Lower secure-least, or wait for more clients."
            )
        secret, own = os.urandom(_masks.SECRET), os.urandom(_masks.SECRET)
        needed = needed_shares(len(peers))
        parts = [_masks.split(one, list(peers), needed) for one in (secret, own)]
        sent = {
            "seal:key": _masks.public_of(_masks.key_of(secret)),
            "seal:own": _masks.commitment(own),
        }
        for other, public in peers.items():
            letter = parts[0][other] + parts[1][other]
            if other != self._index:
                # The letter vouches for the key of this round, which the server passes on.
                sealing = self._letter_key(number, other, public)
                sent[f"seal:{other}"] = _masks.seal(sealing, letter, sent["seal:key"])
        self._write(
            {
                "round": number,
                "peers": _listed(peers),
                "secret": secret.hex(),
                "own": own.hex(),
                "mine": (parts[0][self._index] + parts[1][self._index]).hex(),
                "sent": {name: raw.hex() for name, raw in sent.items()},
            }
        )
        return {name: as_words(raw) for name, raw in sent.items()}

    def _letter_key(self, number: int, other: int, public: bytes, back: bool = False) -> bytes:
        way = (other, self._index) if back else (self._index, other)
        return _masks.agreed(self._key, public, f"letter {self._run} {number} {way[0]}>{way[1]}")

    def closed(self, number: int, arrays: Mapping[str, np.ndarray]) -> tuple[list[int], bool]:
        """Whose letters cannot be opened, and whether those that can be are enough.

        The others have sent something else, or the server has changed it. This client's masks with
        them may be known to somebody, so they do not count.
        """
        kept = self._current(number)
        keys, held = self._letters(kept, arrays)
        found = sorted(set(keys) - set(held))
        if found:
            _log.warning("aipod: the letters of clients %s cannot be opened.", found)
        return found, len(held) >= self._enough(kept)

    def masked(
        self, number: int, arrays: Mapping[str, np.ndarray], vectors: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The second message: the vectors under masks.

        **Arguments:**

        - `arrays`: of the request: `key:I` the public key of client I in this round, and `seal:I`
            its letter to this client.
        - `vectors`: what is to be summed, by name.
        """
        kept = self._current(number)
        keys, held = self._letters(kept, arrays)
        if len(held) < self._enough(kept):
            raise ValueError("too few letters of a secure sum can be opened: it is refused.")
        own = _masks.key_of(bytes.fromhex(kept["secret"]))
        flat = np.concatenate([_masks.encoded(vectors[name]) for name in sorted(vectors)])
        digest = hashlib.sha256(flat.tobytes() + json.dumps(_listed(keys)).encode()).hexdigest()
        if kept.get("masked", digest) != digest:
            raise ValueError("two messages under the same masks would show their difference.")
        texts = {str(other): letter.hex() for other, letter in held.items()}
        self._write(kept | {"masked": digest, "held": texts, "among": sorted(keys)})
        total = flat + _masks.mask(_masks.own_key(bytes.fromhex(kept["own"])), flat.size)
        for other, public in keys.items():
            if other != self._index:
                one = _masks.mask(
                    _masks.agreed(own, public, f"mask {self._run} {number}"), flat.size
                )
                total = total + one if self._index < other else total - one
        return _cut(total.view(np.int64), vectors)

    def _letters(
        self, kept: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
    ) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """The clients' keys for this round, and the letters that can be opened with this one's."""
        keys = {int(n[4:]): as_bytes(v) for n, v in arrays.items() if n.startswith("key:")}
        letters = {int(n[5:]): as_bytes(v) for n, v in arrays.items() if n.startswith("seal:")}
        peers = {int(i): bytes.fromhex(text) for i, text in kept["peers"].items()}
        if not set(keys) <= set(peers) or set(letters) != set(keys) - {self._index}:
            raise ValueError("the clients of a secure sum are not those that it began with.")
        own = _masks.key_of(bytes.fromhex(kept["secret"]))
        if keys.get(self._index) != _masks.public_of(own) or len(keys) < self._least:
            raise ValueError("a secure sum without this client, or with too few: it is refused.")
        held = {self._index: bytes.fromhex(kept["mine"])}
        for other, letter in letters.items():
            key = self._letter_key(int(kept["round"]), other, peers[other], back=True)
            if (found := _masks.opened(key, letter, keys[other])) is not None:
                held[other] = found
        return keys, held

    def _enough(self, kept: Mapping[str, Any]) -> int:
        """How many clients, known by their letters, must be in a sum."""
        return max(needed_shares(len(kept["peers"])), self._least)

    def shares(self, number: int, arrived: set[int]) -> dict[str, np.ndarray]:
        """The third message: for each client a share of one of its two secrets, never of both."""
        kept = self._current(number)
        held = {int(i): bytes.fromhex(text) for i, text in kept.get("held", {}).items()}
        needed, known = self._enough(kept), arrived & set(held)
        strangers = arrived - set(kept.get("among", ()))
        if strangers or self._index not in arrived or len(known) < needed:
            raise ValueError(
                f"a secure sum over clients {sorted(arrived)} is refused: this client must be "
                f"among them, and at least {needed} of those that it has letters from."
            )
        if kept.get("arrived", sorted(arrived)) != sorted(arrived):
            raise ValueError("this round of secure sums has ended with other clients already.")
        self._write(kept | {"arrived": sorted(arrived)})
        return {
            f"share:{other}": as_words(letter[SHARE:] if other in arrived else letter[:SHARE])
            for other, letter in held.items()
        }

    def _current(self, number: int) -> dict[str, Any]:
        kept = self._read()
        if kept.get("round") != number:
            raise ValueError(f"this client has not begun round {number} of secure sums.")
        return kept


def _listed(keys: Mapping[int, bytes]) -> dict[str, str]:
    return {str(index): keys[index].hex() for index in sorted(keys)}


def _cut(total: np.ndarray, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The long vector in the pieces that it was made of."""
    found, begin = {}, 0
    for name in sorted(vectors):
        found[name] = total[begin : begin + vectors[name].size]
        begin += vectors[name].size
    return found
