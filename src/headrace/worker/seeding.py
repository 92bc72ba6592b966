"""Seeding the global generators for the samples of a worker, except those generators that its work does not use.

Seeding Python's and numpy's generators takes four times as long as seeding torch's, and many datasets use neither. A
generator is therefore left alone if a worker's first batch, for which all were seeded, drew nothing from it. If a later
batch moves it, that batch is computed again, and the generator is seeded for each sample from then on. So the batches
are the same bits, unless a draw leaves no trace: where code puts the state back after drawing.
"""

import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.randomness import seed_from_words

_STATE_BYTES = 4 * 625
"""The size of the state of a Mersenne Twister: 624 words, and the place among them."""


class Seeder:
    """Seeds the three global generators for one worker.

    Args:
        shared: Whether other workers use the generators of the same process. Then all are always seeded.

    Attributes:
        seed: Seeds from three words, of 64, 64 and 32 bits for torch, random and numpy.
    """

    def __init__(self, shared: bool = False) -> None:
        self._watched = () if shared else (_Watched(random.seed, python_state), _Watched(np.random.seed, numpy_state))
        self.seed: Callable[[Sequence[int]], None] = seed_from_words if shared else self._seed_each

    def begin(self) -> None:
        """Begin a batch."""
        for one in self._watched:
            one.begin()

    def must_repeat(self, failed: bool) -> bool:
        """End a batch, and return whether it must be computed again, since it drew from a generator without a seed.

        Args:
            failed: Whether it ended in an exception. Then it does not show what a whole batch draws from.
        """
        moved = [one.end(failed) for one in self._watched]
        used = {one.used for one in self._watched}
        self.seed = seed_from_words if used <= {True} else _seed_torch if used == {False} else self._seed_each
        return any(moved)

    def _seed_each(self, words: Sequence[int]) -> None:
        _seed_torch(words)
        for one, word in zip(self._watched, words[1:], strict=True):
            one.seed(word)


def _seed_torch(words: Sequence[int]) -> None:
    torch.default_generator.manual_seed(words[0])


class _Watched:
    """A generator that may not be needed.

    Args:
        seed: Seeds it.
        state: Returns its state, to be compared.

    Attributes:
        used: Whether the work draws from it; None before a batch has shown that.
    """

    def __init__(self, seed: Callable[[int], None], state: Callable[[], Any]) -> None:
        self._seed, self._state = seed, state
        self.used: bool | None = None
        self._before: Any = None

    def begin(self) -> None:
        """Begin a batch."""
        if self.used is False:
            self._seed(0)  # so that a number that it keeps from an earlier draw is lost
            self._before = self._state()
        elif self.used is None:
            self._before = None

    def seed(self, word: int) -> None:
        """Seed it, if it is used or that is not known yet."""
        if self.used is None:
            self.used = self._moved() or None
            self._seed(word)
            self._before = self._state()
        elif self.used:
            self._seed(word)

    def end(self, failed: bool) -> bool:
        """End a batch, and return whether it was moved without a seed."""
        if self.used:
            return False
        moved, unseeded = self._moved(), self.used is False
        if moved or not (failed or self._before is None):
            self.used = moved
        return moved and unseeded

    def _moved(self) -> bool:
        return self._before is not None and self._before != self._state()


def _raw(address: int) -> bytes:
    return ctypes.string_at(address, _STATE_BYTES)


def _python_address() -> int | None:
    """Return where CPython keeps the state of `random`; None if it is not known. Reading it takes a twentieth."""
    instance: Any = random.random.__self__  # type: ignore[attr-defined]
    start = object.__basicsize__
    if sys.implementation.name != "cpython" or type(instance).__basicsize__ < start + _STATE_BYTES:
        return None
    *words, place = random.getstate()[1]
    found = np.frombuffer(_raw(id(instance) + start), np.uint32).tolist()
    return id(instance) + start if found == [place, *words] else None


_PYTHON_ADDRESS = _python_address()
_BIT_GENERATOR: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
_NUMPY_ADDRESS: int | None = _BIT_GENERATOR.ctypes.state_address if type(_BIT_GENERATOR) is np.random.MT19937 else None


def python_state() -> Any:
    """Return the state of `random`, to be compared."""
    return random.getstate() if _PYTHON_ADDRESS is None else _raw(_PYTHON_ADDRESS)


def numpy_state() -> Any:
    """Return the state of `numpy.random`, to be compared."""
    if _NUMPY_ADDRESS is None or np.random.get_bit_generator() is not _BIT_GENERATOR:  # type: ignore[attr-defined]
        return pickle.dumps(np.random.get_state(legacy=False))
    return _raw(_NUMPY_ADDRESS)
