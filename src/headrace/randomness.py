"""Random numbers: the three global generators of a process, and generators of each sample's own."""

import functools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.random  # numpy loads it late, which every forked worker would do again
import torch
from torch.utils.data._utils.worker import _generate_state

from headrace.plan.keys import Key, key
from headrace.system.interrupts import InterruptsHeld


def seed_from_words(words: Sequence[int]) -> None:
    """Seed torch, random and numpy from three words: 64, 64 and 32 bits.

    `torch.manual_seed` also visits every accelerator, at eighty times the cost; work is done on the CPU.

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
        torch.manual_seed(seed)  # also what an accelerator would draw in this worker; it costs a millisecond
    else:
        torch.default_generator.manual_seed(seed)
    _seed_numpy(_generate_state(base_seed, worker_id))  # type: ignore[no-untyped-call]
    return seed


@functools.cache
def accelerated() -> bool:
    """Tell whether torch can use an accelerator; asked before a fork, since each worker would page in what tells."""
    return torch.accelerator.current_accelerator() is not None


def _seed_numpy(words: Sequence[int]) -> None:
    """Do what `np.random.seed` does with several words of 32 bits; that takes a forked worker a hundred pages.

    Python's generator is the same Mersenne Twister and is seeded in the same way, by the words of a number.
    """
    if not words[-1]:  # of which a number has no trace
        np.random.seed(words)
        return
    _, state, _ = random.Random(sum(word << 32 * place for place, word in enumerate(words))).getstate()
    np.random.set_state(("MT19937", np.array(state[:-1], np.uint32), state[-1], 0, 0.0))


class Generators:
    """The states of the three global generators, taken when made.

    Args:
        packed: Instead, what `packed` of another returned.
        torch_alone: Leave out the others, where nothing draws from them: numpy's takes 30 us.
    """

    def __init__(self, packed: tuple[Any, ...] | None = None, torch_alone: bool = False) -> None:
        others = (None, None) if torch_alone or packed else (random.getstate(), np.random.get_state())
        self._states: tuple[Any, ...] = packed or (torch.get_rng_state(), *others)

    def packed(self) -> tuple[Any, ...]:
        """Return the states as tensors, numbers and text alone."""
        torch_state, python_state, numpy_state = self._states
        if numpy_state is None:
            return self._states
        kind, words, *rest = numpy_state
        return torch_state, python_state, (kind, words.tolist(), *rest)

    def restore(self) -> None:
        """Put the states back.

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
        """Return the names of the generators that have been drawn from, or seeded, since."""
        (torch_before, python_before, numpy_before), now = self._states, Generators()._states
        moved = [not torch.equal(torch_before, now[0]), python_before != now[1]]
        moved.append(any(not np.array_equal(one, other) for one, other in zip(numpy_before, now[2], strict=True)))
        return [name for name, one in zip(("torch", "random", "numpy.random"), moved, strict=True) if one]


_kept = threading.Condition()


def _kept_here() -> threading.Condition:
    """Return what the thread that uses the generators holds."""
    return _kept if thread_randomness.lease is None else thread_randomness.lease.kept


class LeaseEnded(BaseException):
    """A thread sets the global generators whose lease was ended; no `Exception`, which the user's code might catch."""


class Lease:
    """Permission for a thread to set the global generators while another keeps them for it; that may end it.

    A block with it is one in which it does not end.

    Attributes:
        kept: Held by that of the threads of the work that uses the generators, in place of what the keeper holds.

    Raises:
        LeaseEnded: By the block's beginning, it has ended.
    """

    def __init__(self) -> None:
        self.kept = threading.Condition()
        self._of = thread_randomness.lease
        self._lock: threading.Lock = threading.Lock() if self._of is None else self._of._lock
        self._ended = False

    def end(self) -> None:
        """End it, and with it those that its thread has given."""
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
    """Leave the caller's generators as they were, whatever the work inside draws or seeds; one thread at a time."""
    with InterruptsHeld() as held, _kept_here():
        callers = Generators()
        try:
            with held.allowed():
                yield
        finally:
            callers.restore()


def wait_for_all(running: Sequence[Future[None]]) -> None:
    """Wait for work in other threads; it may need the generators that this thread keeps for itself meanwhile."""
    kept = _kept_here()

    def notice(_: Future[None]) -> None:
        with kept:
            kept.notify_all()

    for one in running:
        one.add_done_callback(notice)
    with kept:
        kept.wait_for(lambda: all(one.done() for one in running))
    for one in running:
        one.result()


class Keys(NamedTuple):
    """What the randomness of one batch is keyed by: its samples' by their numbers, its collation's by the first.

    Attributes:
        words: What seeds the generators before each sample, if that is known already.
    """

    seed: int
    epoch: int
    numbers: Sequence[int]
    words: Sequence[Sequence[int]] = ()


COLLATION = -1
"""In the place of a sample's place in its batch: the batch as a whole."""


class KeyedGenerators:
    """What the generators of the batch in work are keyed by, and those that were asked for.

    Args:
        keys: The batch's.
        place: Which of its samples is in work, or `COLLATION`.
    """

    __slots__ = ("_made", "keys", "place")

    def __init__(self, keys: Keys, place: int) -> None:
        self.keys, self.place = keys, place
        self._made: dict[str, tuple[int, Any]] = {}

    def restart(self) -> None:
        """Have the place in work begin again with its first numbers."""
        self._made.clear()

    def generator(self, kind: str, make: Callable[[Key], Any]) -> Any:
        """Return the generator of a kind for the place in work, made when it is first asked for."""
        place, generator = self._made.get(kind, (None, None))
        if place != self.place:
            seed, epoch, numbers, _ = self.keys
            purpose, number = ("batch", numbers[0]) if self.place == COLLATION else ("sample", numbers[self.place])
            generator = make(key(f"{kind} {purpose}", seed, epoch, number))
            self._made[kind] = self.place, generator
        return generator


class ThreadRandomness(threading.local):
    """Where this thread's work stands.

    Attributes:
        keyed: The batch in work; None outside of one. Whoever sets it puts it back by an assignment in a `finally`:
            within a call, were it only to a method, an interrupt could come first.
        lease: What it may set the global generators by; None if that depends on nobody.
    """

    keyed: KeyedGenerators | None = None
    lease: Lease | None = None

    def __init__(self) -> None:
        self._outside: dict[str, tuple[int, Any]] = {}

    def generator(self, kind: str, make: Callable[[Key], Any]) -> Any:
        """Return the batch's generator of a kind, or outside of one that which `torch.manual_seed` seeds."""
        if self.keyed is not None:
            return self.keyed.generator(kind, make)
        seed = torch.initial_seed() % 2**64
        if self._outside.get(kind, (None,))[0] != seed:
            self._outside[kind] = seed, make(key(f"{kind} outside", seed))
        return self._outside[kind][1]


thread_randomness = ThreadRandomness()


def _forget_threads() -> None:
    """Begin anew in a forked process, which has none of them, with generators of its own."""
    global _kept
    _kept, thread_randomness.lease = threading.Condition(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def rng() -> np.random.Generator:
    """Return the numpy generator of the sample that is being fetched, or the batch that is being collated.

    Every sample has its own, keyed by (seed, epoch, position): whatever it draws is the same in every executor, also
    in threads, which share the global generators. Call it where you draw, and do not keep it. In an iterable dataset
    it is the batch's; outside of a loader's work it is one that `torch.manual_seed` seeds.
    """
    generator: np.random.Generator = thread_randomness.generator("numpy", _numpy_generator)
    return generator


def torch_rng() -> torch.Generator:
    """Return the torch generator of the sample that is being fetched, as `rng` does numpy's.

    Pass it on: `torch.rand(3, generator=headrace.torch_rng())`.
    """
    generator: torch.Generator = thread_randomness.generator("torch", _torch_generator)
    return generator


def _numpy_generator(under: Key) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(under, np.uint64)))


def _torch_generator(under: Key) -> torch.Generator:
    return torch.Generator().manual_seed(under.low)
