"""Random numbers: the three global generators of a process, and generators for each sample."""

import functools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.random  # numpy imports it late; each forked worker would do that again
import torch
from torch.utils.data._utils.worker import _generate_state

from headrace.plan.keys import Key, Words, key
from headrace.system.interrupts import InterruptsHeld


def seed_from_words(words: Sequence[int]) -> None:
    """Seed torch, random and numpy from three words: 64, 64 and 32 bits.

    `torch.manual_seed` also seeds every accelerator, which takes eighty times as long; workers use the CPU.

    Raises:
        LeaseEnded: The thread had a lease of the generators that was ended.
    """
    if thread_randomness.lease is not None:
        with thread_randomness.lease:
            _seed(*words)
    else:
        _seed(*words)


def _seed(torch_seed: int, python_seed: int, numpy_seed: int) -> None:
    torch.default_generator.manual_seed(torch_seed)
    random.seed(python_seed)
    np.random.seed(numpy_seed)


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed the three generators as torch seeds its worker `worker_id`, and return the worker's seed."""
    seed = base_seed + worker_id
    random.seed(seed)
    if accelerated():
        torch.manual_seed(seed)  # also seeds the accelerator; it takes a millisecond
    else:
        torch.default_generator.manual_seed(seed)
    _seed_numpy(_generate_state(base_seed, worker_id))  # type: ignore[no-untyped-call]
    return seed


@functools.cache
def accelerated() -> bool:
    """Tell whether torch can use an accelerator. Call it before a fork: in workers, each call would load many pages."""
    return torch.accelerator.current_accelerator() is not None


def _seed_numpy(words: Sequence[int]) -> None:
    """Do the same as `np.random.seed` with words of 32 bits; that costs a forked worker a hundred pages.

    Python's generator is the same Mersenne Twister, and is seeded in the same way from the words of an integer.
    """
    if not words[-1]:  # an integer does not keep a zero as its highest word
        np.random.seed(words)
        return
    _, state, _ = random.Random(sum(word << 32 * place for place, word in enumerate(words))).getstate()
    np.random.set_state(("MT19937", np.array(state[:-1], np.uint32), state[-1], 0, 0.0))


class Generators:
    """The states of the three global generators at the time when this object was made.

    Args:
        packed: The states to use instead, as `packed` returned them.
        torch_alone: Whether to leave out random and numpy, where nothing draws from them: numpy's state takes 30 us.
    """

    def __init__(self, packed: tuple[Any, ...] | None = None, torch_alone: bool = False) -> None:
        others = (None, None) if torch_alone or packed else (random.getstate(), np.random.get_state())
        self._states: tuple[Any, ...] = packed or (torch.get_rng_state(), *others)

    def packed(self) -> tuple[Any, ...]:
        """Return the states as tensors, numbers and text only."""
        torch_state, python_state, numpy_state = self._states
        if numpy_state is None:
            return self._states
        kind, words, *rest = numpy_state
        return torch_state, python_state, (kind, words.tolist(), *rest)

    def restore(self) -> None:
        """Restore the states.

        Raises:
            LeaseEnded: The thread had a lease of the generators that was ended.
        """
        if thread_randomness.lease is not None:
            with thread_randomness.lease:
                self._restore()
        else:
            self._restore()

    def _restore(self) -> None:
        torch_state, python_state, numpy_state = self._states
        torch.set_rng_state(torch_state)
        if python_state is not None:
            random.setstate(python_state)
            np.random.set_state(numpy_state)

    def moved(self) -> list[str]:
        """Return the names of the generators whose states have changed since."""
        (torch_before, python_before, numpy_before), now = self._states, Generators()._states
        moved = [not torch.equal(torch_before, now[0]), python_before != now[1]]
        moved.append(any(not np.array_equal(one, other) for one, other in zip(numpy_before, now[2], strict=True)))
        return [name for name, one in zip(("torch", "random", "numpy.random"), moved, strict=True) if one]


_condition = threading.Condition()


def _current_condition() -> threading.Condition:
    """Return the condition that a thread holds while it uses the generators."""
    return _condition if thread_randomness.lease is None else thread_randomness.lease.condition


class LeaseEnded(BaseException):
    """A thread sets the global generators after its lease has ended. No `Exception`, which user code might catch."""


class Lease:
    """Permission for a thread to set the global generators while another thread preserves them, which may end it.

    `with lease:` is a block in which the lease does not end.

    Attributes:
        condition: The threads of the work hold it while they use the generators. The preserving thread holds the
            process's own.

    Raises:
        LeaseEnded: The lease has ended before the block.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self._of = thread_randomness.lease
        self._lock: threading.Lock = threading.Lock() if self._of is None else self._of._lock
        self._ended = False

    def end(self) -> None:
        """End it, and all leases that its thread has given."""
        with self._lock:
            self._ended = True

    def _check(self) -> None:
        if self._of is not None:
            self._of._check()
        if self._ended:
            raise LeaseEnded

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self._check()
        except LeaseEnded:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@contextmanager
def callers_generators_kept() -> Iterator[None]:
    """Restore the caller's generators after the block, whatever it draws or seeds.

    Other threads that begin such a block wait until this one ends.
    """
    with InterruptsHeld() as held, _current_condition():
        callers = Generators()
        try:
            with held.allowed():
                yield
        finally:
            callers.restore()


def wait_for_all(running: Sequence[Future[None]]) -> None:
    """Wait for work in other threads. They may use the generators meanwhile, which this thread preserves otherwise."""
    condition = _current_condition()

    def notice(_: Future[None]) -> None:
        with condition:
            condition.notify_all()

    for one in running:
        one.add_done_callback(notice)
    with condition:
        condition.wait_for(lambda: all(one.done() for one in running))
    for one in running:
        one.result()


class Keys(NamedTuple):
    """The keys of one batch's random numbers: each sample's number, and for collation the first one.

    Attributes:
        seed: The seed.
        epoch: The epoch.
        numbers: The number of each sample.
        words: The words that seed the global generators before each sample, shape (n, 3), if they are computed already.
        batch_words: Those that seed them before collation, likewise.
    """

    seed: int
    epoch: int
    numbers: Sequence[int]
    words: Words | None = None
    batch_words: Sequence[int] | None = None


COLLATION = -1
"""Stands for the batch as a whole, where otherwise a sample's place in its batch is given."""


class KeyedGenerators:
    """The keys of the current batch, and the generators made from them so far.

    Args:
        keys: The keys of the batch.
        place: The place of the current sample in the batch, or `COLLATION`.
    """

    __slots__ = ("_made", "keys", "place")

    def __init__(self, keys: Keys, place: int) -> None:
        self.keys, self.place = keys, place
        self._made: dict[str, tuple[int, Any]] = {}

    def restart(self) -> None:
        """Restart the random numbers of the current place."""
        self._made.clear()

    def generator(self, kind: str, make: Callable[[Key], Any]) -> Any:
        """Return the generator of a kind for the current place, made at the first call."""
        place, generator = self._made.get(kind, (None, None))
        if place != self.place:
            seed, epoch, numbers, *_ = self.keys
            purpose, number = ("batch", numbers[0]) if self.place == COLLATION else ("sample", numbers[self.place])
            generator = make(key(f"{kind} {purpose}", seed, epoch, number))
            self._made[kind] = self.place, generator
        return generator


class ThreadRandomness(threading.local):
    """What determines the random numbers of this thread.

    Attributes:
        keyed: The generators of the current batch; None outside of one. Restore it by an assignment in a `finally`:
            before a call, even of a method, an interrupt could come.
        lease: The permission to set the global generators; None where it needs none.
    """

    keyed: KeyedGenerators | None = None
    lease: Lease | None = None

    def __init__(self) -> None:
        self._outside: dict[str, tuple[int, Any]] = {}

    def generator(self, kind: str, make: Callable[[Key], Any]) -> Any:
        """Return the current batch's generator of a kind; outside of a batch, one that `torch.manual_seed` seeds."""
        if self.keyed is not None:
            return self.keyed.generator(kind, make)
        seed = torch.initial_seed() % 2**64
        if self._outside.get(kind, (None,))[0] != seed:
            self._outside[kind] = seed, make(key(f"{kind} outside", seed))
        return self._outside[kind][1]


thread_randomness = ThreadRandomness()


def _forget_threads() -> None:
    """Reset the locks in a forked process: the threads are not there, and the generators are its own."""
    global _condition
    _condition, thread_randomness.lease = threading.Condition(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def rng() -> np.random.Generator:
    """Return the numpy generator of the sample that is being fetched, or the batch that is being collated.

    Every sample has its own, keyed by (seed, epoch, position). Its numbers are the same in every executor, also in
    threads, which share the global generators. Call it where you draw, and do not keep it. In an iterable dataset each
    batch has one. Outside of a loader's work, `torch.manual_seed` seeds it.
    """
    generator: np.random.Generator = thread_randomness.generator("numpy", _numpy_generator)
    return generator


def torch_rng() -> torch.Generator:
    """Return the torch generator of the sample that is being fetched, as `rng` returns numpy's.

    Pass it to torch: `torch.rand(3, generator=headrace.torch_rng())`.
    """
    generator: torch.Generator = thread_randomness.generator("torch", _torch_generator)
    return generator


def _numpy_generator(under: Key) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(under, np.uint64)))


def _torch_generator(under: Key) -> torch.Generator:
    return torch.Generator().manual_seed(under.low)
