"""The cryptography of secure sums: secrets in shares, sealed letters, and masks that cancel.

After Bonawitz et al., "Practical secure aggregation for privacy-preserving machine learning" (CCS
2017). Two clients agree on a mask; one adds it and the other subtracts it, so that it cancels in
the sum. Each client adds a mask of its own besides. Both kinds of secrets are split into shares
(Shamir 1979), so that enough clients can help the server to remove the masks of a client that has
gone: either its own mask or those it has with others, and never both.

Primitives are those of the `cryptography` package: X25519, HKDF with SHA-256, ChaCha20-Poly1305 for
letters, and ChaCha20 for masks.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

# Indices of clients are below this.
_PLACES = 2**31
# A prime above every secret, which has 31 bytes.
PRIME = 2**255 - 19
SECRET = 31
SHARE = 32
# A sealed letter: two shares, and what shows that nobody has changed it.
LETTER = 2 * SHARE + 16
# Steps in one unit of the fixed-point numbers that are summed, and the largest such number. Sums of
# 2^15 clients do not overflow.
_FINE = 2.0**32
LARGEST = 2.0**16


def split(secret: bytes, places: Sequence[int], needed: int) -> dict[int, bytes]:
    """Shares of a secret, one for each place; `needed` of them give it back, fewer tell nothing."""
    if not all(0 <= place < _PLACES for place in places):
        # The share at -1 is the secret itself.
        raise ValueError(f"a client of a secure sum has an index that is none: {list(places)}.")
    numbers = [int.from_bytes(secret)] + [secrets.randbelow(PRIME) for _ in range(needed - 1)]

    def at(place: int) -> int:
        found = 0
        for number in reversed(numbers):
            found = (found * (place + 1) + number) % PRIME
        return found

    return {place: at(place).to_bytes(SHARE) for place in places}


def joined(shares: Mapping[int, bytes]) -> bytes:
    """The secret again; `ValueError` when the shares do not belong together."""
    total = 0
    for one, share in shares.items():
        above = below = 1
        for other in shares:
            if other != one:
                above = above * (other + 1) % PRIME
                below = below * (other - one) % PRIME
        total += int.from_bytes(share) * above * pow(below, -1, PRIME)
    secret = total % PRIME
    if secret >= 256**SECRET:
        raise ValueError("shares of a secret do not belong together.")
    return secret.to_bytes(SECRET)


def key_of(secret: bytes) -> X25519PrivateKey:
    """The private key that belongs to a secret of 31 bytes."""
    return X25519PrivateKey.from_private_bytes(hashlib.sha256(b"aipod key" + secret).digest())


def public_of(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def agreed(own: X25519PrivateKey, other: bytes, what: str) -> bytes:
    """32 bytes that two clients agree on for one purpose, and nobody else knows."""
    shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(hashes.SHA256(), 32, None, f"aipod {what}".encode()).derive(shared)


def usable(public: bytes) -> bool:
    """Whether others can agree on anything with this key; with some points of the curve not."""
    try:
        agreed(X25519PrivateKey.generate(), public, "trial")
    except ValueError:
        return False
    return True


def commitment(secret: bytes) -> bytes:
    """What shows later that a secret was put together rightly, and tells nothing of it before."""
    return hashlib.sha256(b"aipod commitment" + secret).digest()


def seal(key: bytes, letter: bytes, about: bytes) -> bytes:
    """An encrypted letter. Each key is used for one letter alone, so the nonce is fixed.

    `about`: what travels beside it, and cannot be changed without the letter being refused.
    """
    return ChaCha20Poly1305(key).encrypt(bytes(12), letter, about)


def opened(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """The letter again; None when it, or what it is about, was changed on its way."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, about)
    except InvalidTag:
        return None


def mask(key: bytes, size: int) -> np.ndarray:
    """A vector of 64-bit numbers that looks random to everybody without the key."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), "<u8").astype(np.uint64)


def own_key(secret: bytes) -> bytes:
    """The key of a client's own mask."""
    return hashlib.sha256(b"aipod own mask" + secret).digest()


def encoded(values: np.ndarray) -> np.ndarray:
    """Numbers as whole ones modulo 2^64; those that are too large are cut, and NaN counts as 0."""
    usable = np.nan_to_num(values.astype(float), nan=0.0, posinf=LARGEST, neginf=-LARGEST)
    steps = np.rint(np.clip(usable, -LARGEST, LARGEST) * _FINE)
    return steps.astype(np.int64).view(np.uint64)


def decoded(total: np.ndarray) -> np.ndarray:
    """The sum of such numbers."""
    return total.view(np.int64).astype(float) / _FINE


def as_words(raw: bytes) -> np.ndarray:
    """Bytes as an array that a message can hold."""
    return np.frombuffer(raw, "<u4").astype(np.uint32)


def as_bytes(words: np.ndarray) -> bytes:
    return np.asarray(words, "<u4").tobytes()
