"""Keyed permutations of [0, n), evaluated only at the positions that are asked for."""

import math
from collections.abc import Callable

import numpy as np

from headrace.plan.keys import Key, Words, hash64, mix
from headrace.types import Indices, Positions

SMALL = 2**16
"""Below this size a permutation is a table (at most 512 KiB); from it on, a network without memory."""

_ROUNDS = 8


def permutation(under: Key, n: int) -> Callable[[Positions], Indices]:
    """Return the bijection on [0, n) that belongs to a key.

    Small domains sort n hashed counters, which makes every permutation equally likely (a network is biased on
    tiny domains) and, unlike a library's shuffle, will not change under a new numpy. Large ones cost
    no memory and the same time per position whatever n is.

    Args:
        under: The key: one permutation each.
        n: Size of the domain, >= 1.

    Returns:
        A function from positions in [0, n) to indices in [0, n), shape (m,) to (m,).
    """
    if n < SMALL:
        table = np.argsort(hash64(under, np.arange(n)), kind="stable")
        return table.__getitem__
    return _Network(under, n)


class _Network:
    """A modular Feistel network on Z_a × Z_b with a·b just above n, and cycle walking back into [0, n).

    With a = ⌈√n⌉ and b = ⌈n/a⌉ the domain exceeds n by less than a, so that a second walk is rare; the usual
    power-of-two domain can be four times too large. Eight rounds: the whole codebook is seen here, so the
    four that suffice against few queries do not.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), generalized Feistel.
    """

    def __init__(self, under: Key, n: int) -> None:
        self._n = n
        a = math.isqrt(n - 1) + 1
        self._a, self._b = np.uint64(a), np.uint64(-(-n // a))
        self._rounds = hash64(under, np.arange(_ROUNDS))

    def __call__(self, positions: Positions) -> Indices:
        indices = self._once(positions.astype(np.uint64))
        outside = np.flatnonzero(indices >= self._n)
        while outside.size:
            indices[outside] = self._once(indices[outside])
            outside = outside[indices[outside] >= self._n]
        return indices.astype(np.int64)

    def _once(self, x: Words) -> Words:
        left, right = np.divmod(x, self._b)
        for even, odd in zip(self._rounds[0::2], self._rounds[1::2], strict=True):
            # Halving the hash keeps the sum below 2^64, so that one remainder serves hash and sum.
            left = (left + (mix(right ^ even) >> np.uint64(1))) % self._a
            right = (right + (mix(left ^ odd) >> np.uint64(1))) % self._b
        result: Words = left * self._b + right
        return result
