"""Seeding the global generators for the samples of a worker, except those generators that its work does not use.

Seeding all three costs more than many a sample, and many datasets draw from none of them. A generator is therefore
left alone if a worker's first batch, for which all were seeded, drew nothing from it. If a later batch moves it, that
batch is computed again, and the generator is seeded for each sample from then on. So the batches are the same bits,
unless a draw leaves no trace: where code draws from a copy of the state, or puts the state of `random` or numpy back
after drawing. Torch's state is marked in bytes that torch does not use, and putting a state back clears them. Code may
also ask torch for the last seed. That is set for each sample in any case; only the state behind it is not computed.
"""

import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.plan.keys import Words, key
from headrace.randomness import seed_from_words

_STATE_BYTES = 4 * 625
"""The size of the state of a Mersenne Twister: 624 words, and the place among them."""

_TORCH_STATE_BYTES = _STATE_BYTES + 8
"""The size of torch's: how many words are left, whether it is seeded, the place, and 624 words."""

_COMPARED_BYTES = 128
"""How much of a state is compared: the place, and words beside it. A draw moves the place or changes all words."""

_TORCH_HEAD_BYTES = 256
"""Where, from the beginning of a generator of torch's, the seed is looked for."""

_MARK, _MARKED = b"\xa5\x5a\xc3", slice(5, 8)
"""What is written into a state of torch's, and where: after the byte that says whether it is seeded nothing is kept."""

_UNUSED_SEED = 0x9B3D_62E1
"""The seed of generators that are not used. Users' code does not have this number, so its own seeds move the state."""


def worker_base_seed(words: Sequence[int], epoch: int) -> int:
    """Return the base seed of workers that begin in an epoch under a seed of the loader's: worker i has it plus i.

    Args:
        words: The loader's seed, and the rank, unless all ranks must read the same samples.
        epoch: The epoch. Workers that persist keep the seed of the one in which they began, as torch's do.
    """
    return key("worker", *words, epoch).low % 2**63


class Seeder:
    """Seeds the three global generators for one worker.

    Args:
        shared: Whether other workers use the generators of the same process. Then all are always seeded.
    """

    def __init__(self, shared: bool = False) -> None:
        self._watched: tuple[_Watched, ...] = ()
        if not shared:
            self._watched = (
                _Watched(torch.default_generator.manual_seed, torch_state, _seed_setter(), _mark_torch),
                _Watched(random.seed, python_state),
                _Watched(np.random.seed, numpy_state),
            )
            if _TORCH is None:
                self._watched[0].decide(used=True)

    def seed(self, words: Sequence[int]) -> None:
        """Seed from three words, of 64, 64 and 32 bits for torch, random and numpy."""
        if self._watched:
            for one, word in zip(self._watched, words, strict=True):
                one.seed(word)
        else:
            seed_from_words(words)

    def each(self, words: Words) -> tuple[Callable[[Any], None], list[Any]]:
        """Return a function that seeds for one sample, and its argument for each sample of a batch.

        Args:
            words: The words of the samples, shape (n, 3).
        """
        if self._watched and self._watched[1].used is self._watched[2].used is False:
            return self._watched[0].seed, words[:, 0].tolist()
        return self.seed, words.tolist()

    def begin(self, replaced: bool = False) -> None:
        """Begin a batch.

        Args:
            replaced: Whether the generators have had other states since the last batch.
        """
        for one in self._watched:
            one.begin(replaced)

    def must_repeat(self, failed: bool) -> bool:
        """End a batch, and return whether it must be computed again, since it drew from a generator without a seed.

        Args:
            failed: Whether it ended in an exception. Then it does not show what a whole batch draws from.
        """
        moved = [one.end(failed) for one in self._watched]  # each has to end
        return any(moved)


def _mark_torch() -> None:
    if _TORCH is not None:
        _TORCH[1][_MARKED] = _MARK


def _seed_setter() -> Callable[[int], None]:
    """Return what sets the seed that torch tells, without the state that follows from it."""
    seed = ctypes.c_uint64() if _TORCH is None else _TORCH[0]

    def set_seed(word: int) -> None:
        seed.value = word

    return set_seed


class _Watched:
    """A generator that may not be needed.

    Args:
        seed: Seeds it.
        state: Returns its state, to be compared.
        skip: Gets each seed that is left out.
        mark: Marks its state, so that it differs when it was put back.

    Attributes:
        used: Whether the work draws from it; None before a batch has shown that.
        seed: Seeds it for a sample, as far as that is needed.
    """

    def __init__(
        self,
        seed: Callable[[int], Any],
        state: Callable[[], Any],
        skip: Callable[[int], None] = lambda word: None,
        mark: Callable[[], None] = lambda: None,
    ) -> None:
        self._seed, self._state, self._skip, self._mark = seed, state, skip, mark
        self._before: Any = None
        self.used: bool | None = None
        self.seed: Callable[[int], Any] = self._seed_and_watch

    def decide(self, used: bool) -> None:
        """Decide whether it is seeded for each sample."""
        self.used, self.seed = used, self._seed if used else self._skip

    def begin(self, replaced: bool) -> None:
        """Begin a batch."""
        if self.used is None:
            self._before = None
        elif replaced and not self.used:
            self._watch(_UNUSED_SEED)  # so that a number that it keeps from an earlier draw is lost

    def _seed_and_watch(self, word: int) -> None:
        if self._moved():
            self.decide(used=True)
        self._watch(word)

    def _watch(self, word: int) -> None:
        self._seed(word)
        self._mark()
        self._before = self._state()

    def end(self, failed: bool) -> bool:
        """End a batch, and return whether it was moved without a seed."""
        if self.used or self._before is None:
            return False
        moved, unseeded = self._before != self._state(), self.used is False
        if moved or not (failed or unseeded):
            self.decide(moved)
        return moved and unseeded

    def _moved(self) -> bool:
        return self._before is not None and self._before != self._state()


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _python_memory() -> memoryview | None:
    """Return where CPython keeps the state of `random`; None if that is not known. Reading it takes a hundredth."""
    instance: Any = random.random.__self__  # type: ignore[attr-defined]
    start = object.__basicsize__
    if sys.implementation.name != "cpython" or type(instance).__basicsize__ < start + _STATE_BYTES:
        return None
    memory = _memory(id(instance) + start, _STATE_BYTES)
    *words, place = random.getstate()[1]
    same = np.frombuffer(memory, np.uint32).tolist() == [place, *words]
    return memory[:_COMPARED_BYTES] if same else None


def _torch_memory() -> tuple[ctypes.c_uint64, memoryview] | None:
    """Return where torch keeps the last seed of its default generator, and the state; None if that is not known."""
    probe: Any = torch.Generator(device="cpu").manual_seed(_UNUSED_SEED)
    if not hasattr(probe, "_cdata") or torch.default_generator.device != probe.device:
        return None
    start = ctypes.string_at(probe._cdata, _TORCH_HEAD_BYTES).find(struct.pack("=Q", _UNUSED_SEED))
    if start < 0:
        return None
    torch.rand(3, generator=probe, device="cpu")
    seed, state = _torch_parts(probe, start)
    seed.value = 2**64 - 3
    _, left, place, *words = np.frombuffer(probe.get_state().numpy(), np.uint64)[:627].tolist()
    found = np.frombuffer(state, np.uint32).tolist()
    same = [left % 2**32, place, *words] == [found[0], *found[2:]] and probe.initial_seed() == seed.value
    state[_MARKED] = _MARK
    torch.rand(3, generator=probe, device="cpu")
    before = probe.get_state()
    same &= bytes(state[_MARKED]) == _MARK
    probe.set_state(before)
    same &= bytes(state[_MARKED]) != _MARK and torch.equal(before, probe.get_state())
    seed, state = _torch_parts(torch.default_generator, start)
    return (seed, state[:_COMPARED_BYTES]) if same else None


def _torch_parts(generator: Any, start: int) -> tuple[ctypes.c_uint64, memoryview]:
    address = generator._cdata + start
    return ctypes.c_uint64.from_address(address), _memory(address + 8, _TORCH_STATE_BYTES)


def _numpy_memory() -> tuple[Any, memoryview] | None:
    """Return numpy's global bit generator, and where its state ends with the place; None if that is not known."""
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return None
    return generator, _memory(generator.ctypes.state_address, _STATE_BYTES)[-_COMPARED_BYTES:]


_TORCH, _PYTHON, _NUMPY = _torch_memory(), _python_memory(), _numpy_memory()


def torch_state() -> Any:
    """Return the state of torch's default generator, to be compared."""
    return torch.get_rng_state().numpy().tobytes() if _TORCH is None else _TORCH[1].tobytes()


def python_state() -> Any:
    """Return the state of `random`, to be compared."""
    return random.getstate() if _PYTHON is None else _PYTHON.tobytes()


def numpy_state() -> Any:
    """Return the state of `numpy.random`, to be compared."""
    if _NUMPY is None or np.random.get_bit_generator() is not _NUMPY[0]:  # type: ignore[attr-defined]
        return pickle.dumps(np.random.get_state(legacy=False))
    return _NUMPY[1].tobytes()
