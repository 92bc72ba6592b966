"""Keys and counter-based hashing, the source of every random number of a plan.

A key is a hash of a purpose and of fixed-width words, so that (1, 2), (2, 1), (7, 3) and (7, 3, 0) all give
different keys. Under a key, `hash64` turns any array of counters into independent 64-bit words: randomness is
a function of position, whoever evaluates it.
"""

import functools
import hashlib
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_ALL = 2**64 - 1

_FEW = 8
"""Up to this number of positions plain Python is faster than numpy."""


class Key(NamedTuple):
    """128 bits, as two 64-bit words."""

    low: int
    high: int


@functools.lru_cache(maxsize=256, typed=True)
def key(purpose: str, *words: int) -> Key:
    """Derive the key for one purpose from integers.

    Args:
        purpose: Separates keys with the same words ("shuffle", "sample", ...).
        *words: Integers in [0, 2^64), each hashed as eight bytes, with their number.

    Returns:
        A key that differs wherever the purpose, a word, the order of words or their number does.

    Raises:
        OverflowError: A word lies outside [0, 2^64).

    Source: BLAKE2 (RFC 7693), with the purpose and the word count as a prefix.
    """
    tag = purpose.encode()
    head = (len(tag).to_bytes(8, "little"), tag, len(words).to_bytes(8, "little"))
    message = b"".join([*head, *(operator.index(word).to_bytes(8, "little") for word in words)])
    digest = hashlib.blake2b(message, digest_size=16).digest()
    return Key(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


def mix(words: Words) -> Words:
    """Scramble each 64-bit word by a bijection in which every input bit reaches every output bit.

    Source: the finalizer of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators" (2014), with Stafford's variant 13 constants.
    """
    words = words ^ (words >> np.uint64(30))
    words *= _MULTIPLIER_1
    words ^= words >> np.uint64(27)
    words *= _MULTIPLIER_2
    words ^= words >> np.uint64(31)
    return words


def hash64(under: Key, counters: NDArray[np.integer]) -> Words:
    """Hash counters to independent 64-bit words under a key, in the counters' shape.

    Two rounds of `mix` with the key's halves added between, so that neither equal counters under
    different keys nor neighbouring counters under one key give related words.
    """
    words = counters.astype(np.uint64)
    words ^= np.uint64(under.low)
    words = mix(words)
    words += np.uint64(under.high)
    return mix(words)


def uniforms(under: Key, counters: NDArray[np.integer]) -> NDArray[np.float64]:
    """Hash counters to doubles in [0, 1), multiples of 2^-53, in the counters' shape."""
    return (hash64(under, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator_seeds(under: Key, positions: NDArray[np.int64]) -> Words:
    """Seed words for the three global generators (torch, random, numpy) at each position.

    Args:
        under: The key of the epoch's samples, or of its batches.
        positions: Global positions, shape (n,).

    Returns:
        Shape (n, 3): 64 bits for torch, 64 for `random`, 32 for `numpy.random`.
    """
    words = hash64(under, positions[:, None] * 3 + np.arange(3))
    words[:, 2] >>= np.uint64(32)
    return words


def generator_seeds_at(under: Key, position: int) -> list[int]:
    """Return the row of `generator_seeds` for one position, ten times as fast as numpy."""
    first = position * 3
    words = [_mixed((_mixed(counter & _ALL ^ under.low) + under.high) & _ALL) for counter in range(first, first + 3)]
    words[2] >>= 32
    return words


def _mixed(word: int) -> int:
    """Scramble one word as `mix` does."""
    word ^= word >> 30
    word = word * 0xBF58476D1CE4E5B9 & _ALL
    word ^= word >> 27
    word = word * 0x94D049BB133111EB & _ALL
    return word ^ word >> 31


def sample_seeds(seed: int, epoch: int, positions: Sequence[int]) -> list[list[int]]:
    """Return the seeds of torch, random and numpy for the sample at each position: three words each."""
    return _seeds(key("sample", seed, epoch), positions)


def sample_words(seed: int, epoch: int, positions: NDArray[np.int64]) -> Words:
    """Return the words of `sample_seeds` as an array, for many positions, shape (n,) to (n, 3)."""
    return generator_seeds(key("sample", seed, epoch), np.asarray(positions, np.int64))


def batches_seeds(seed: int, epoch: int, positions: Sequence[int]) -> list[list[int]]:
    """Return the words of `batch_seeds` for several batches, whose first positions are given."""
    return _seeds(key("batch", seed, epoch), positions)


def _seeds(under: Key, positions: Sequence[int]) -> list[list[int]]:
    if len(positions) <= _FEW:
        return [generator_seeds_at(under, position) for position in positions]
    words: list[list[int]] = generator_seeds(under, np.asarray(positions, np.int64)).tolist()
    return words


def batch_seeds(seed: int, epoch: int, position: int) -> list[int]:
    """Return the three words that seed the generators before a batch is collated, keyed by its first position."""
    return generator_seeds_at(key("batch", seed, epoch), position)
