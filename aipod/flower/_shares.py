"""A secret from its shares, some of which may be wrong.

Shares are values of a polynomial of degree below `needed`, and the secret is its value at 0. With m
shares, up to (m - needed) / 2 wrong ones are found out, whichever they are, by the decoder of Gao
("A new algorithm for decoding Reed-Solomon codes", 2003). The secret can be checked, so with few
clients groups of shares are tried too, which finds out up to m - needed.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

from aipod.flower._masks import PRIME, SECRET, joined

Polynomial = list[int]  # the lowest power first
# How many groups of shares are tried before a secret is given up.
_TRIES = 200


def recovered(
    shares: Mapping[int, bytes], needed: int, right: Callable[[bytes], bool]
) -> tuple[bytes, set[int]] | None:
    """The secret, and whose shares of it are wrong; None where it cannot be found.

    **Arguments:**

    - `shares`: by the place of whoever gave them.
    - `needed`: how many of them give the secret.
    - `right`: whether a secret is the one.
    """
    if len(shares) < needed:
        return None
    points = {place + 1: int.from_bytes(share) for place, share in shares.items()}
    found = _decoded(points, needed)
    secret = None if found is None else _secret(found)
    if found is not None and secret is not None and right(secret):
        return secret, {x - 1 for x, value in points.items() if _at(found, x) != value % PRIME}
    for group in itertools.islice(itertools.combinations(sorted(shares), needed), _TRIES):
        if (secret := _of_group(shares, group, right)) is not None:
            others = set(shares) - set(group)
            wrong = {i for i in others if _of_group(shares, [*group[1:], i], right) is None}
            return secret, wrong
    return None


def _of_group(
    shares: Mapping[int, bytes], group: Sequence[int], right: Callable[[bytes], bool]
) -> bytes | None:
    try:
        secret = joined({place: shares[place] for place in group})
    except ValueError:
        return None
    return secret if right(secret) else None


def _secret(polynomial: Polynomial) -> bytes | None:
    first = polynomial[0] if polynomial else 0
    return first.to_bytes(SECRET) if first < 256**SECRET else None


def _decoded(points: Mapping[int, int], needed: int) -> Polynomial | None:
    """The polynomial of degree below `needed` through most of the points."""
    through, product = _interpolated(points)
    before, now = product, through
    factor_before: Polynomial = []
    factor: Polynomial = [1]
    while 2 * (len(now) - 1) >= len(points) + needed:
        quotient, rest = _divided(before, now)
        before, now = now, rest
        factor_before, factor = factor, _minus(factor_before, _times(quotient, factor))
    found, rest = _divided(now, factor)
    return found if not rest and len(found) <= needed else None


def _interpolated(points: Mapping[int, int]) -> tuple[Polynomial, Polynomial]:
    """The polynomial through all points (Newton), and the one that is zero at their places."""
    found: Polynomial = []
    product: Polynomial = [1]
    for x, value in points.items():
        slope = (value - _at(found, x)) * pow(_at(product, x), -1, PRIME)
        found = _minus(found, [-slope * one for one in product])
        product = _minus([0, *product], [x * one for one in product])
    return found, product


def _at(polynomial: Polynomial, x: int) -> int:
    value = 0
    for one in reversed(polynomial):
        value = (value * x + one) % PRIME
    return value


def _short(polynomial: Polynomial) -> Polynomial:
    polynomial = [one % PRIME for one in polynomial]
    while polynomial and polynomial[-1] == 0:
        polynomial.pop()
    return polynomial


def _minus(first: Polynomial, second: Polynomial) -> Polynomial:
    pairs = itertools.zip_longest(first, second, fillvalue=0)
    return _short([a - b for a, b in pairs])


def _times(first: Polynomial, second: Polynomial) -> Polynomial:
    found = [0] * (len(first) + len(second))
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            found[i + j] += one * other
    return _short(found)


def _divided(above: Polynomial, below: Polynomial) -> tuple[Polynomial, Polynomial]:
    """The quotient and the rest."""
    rest, inverse = list(above), pow(below[-1], -1, PRIME)
    quotient = [0] * max(len(above) - len(below) + 1, 0)
    for place in reversed(range(len(quotient))):
        quotient[place] = share = rest[place + len(below) - 1] * inverse % PRIME
        for i, one in enumerate(below):
            rest[place + i] = (rest[place + i] - share * one) % PRIME
    return _short(quotient), _short(rest)
