"""Turns: which threads of the process compute batches, and which one computes alone, or has another do it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.randomness import Generators, Lease
from headrace.randomness import here as work_here
from headrace.system.interrupts import InterruptsHeld
from headrace.types import Task


class OverLimit(Exception):
    """What was waited for has not happened by the deadline."""


class Turns:
    """What all threads of the process share: whether some compute, or one alone.

    Attributes:
        lock: Held while anything of it, or of a crew, is looked at or changed. No `Condition`: a Ctrl-C among the lines
            of its methods would leave it locked.
        running: Batches being computed in worker threads.
        paused: Whether no further one may begin.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.running = 0
        self.paused = False
        self._bells: list[threading.Lock] = []

    def tell(self) -> None:
        """Have all who wait look again; to be called with the lock."""
        bells, self._bells = self._bells, []
        for bell in bells:
            bell.release()

    def wait_for(self, happened: Callable[[], bool], deadline: float | None = None) -> bool:
        """Wait until something, asked with the lock, is so; return whether it is, by the deadline."""
        while True:
            with InterruptsHeld(), self.lock:
                if happened():
                    return True
                bell = threading.Lock()
                bell.acquire()
                self._bells.append(bell)
            if not bell.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
                return False

    @contextmanager
    def alone(self, held: InterruptsHeld, deadline: float | None = None) -> Iterator[None]:
        """Keep other worker threads from computing meanwhile. May be nested.

        Raises:
            OverLimit: Those that compute, or are alone, were not done by the deadline.
        """
        if this_thread.alone:
            yield
            return
        own = int(this_thread.computing)  # a loader inside a dataset: the batch that this thread computes waits, too
        with self.lock:
            self._count(-own)
        try:
            with held.let():
                if not (self.wait_for(self._pause, deadline) and self.wait_for(lambda: not self.running, deadline)):
                    raise OverLimit
            yield
        finally:
            self._resume(own)

    def _pause(self) -> bool:
        if not self.paused:
            self.paused = this_thread.alone = True
        return this_thread.alone

    def _resume(self, own: int) -> None:
        with self.lock:
            if this_thread.alone:
                self.paused = this_thread.alone = False
            self._count(own)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count this thread, which `running` was raised for already, as computing."""
        this_thread.computing = True
        try:
            yield
        finally:
            this_thread.computing = False
            with self.lock:
                self._count(-1)

    def _count(self, change: int) -> None:
        self.running += change
        self.tell()


class ThisThread(threading.local):
    """What a thread is at.

    Attributes:
        info: What `get_worker_info` tells in it, if it is a worker.
        computing: Whether it is a worker in the middle of a batch.
        alone: Whether it keeps others from computing.
    """

    info: Any = None
    computing = False
    alone = False


this_thread = ThisThread()
turns = Turns()


Outcome = tuple[Any, BaseException | None]
"""A batch, or the error in its place."""


@dataclass(eq=False)
class Errand:
    """A batch that its worker's thread computes alone while the caller waits; if that gives up, it runs on.

    Attributes:
        task: What is computed.
        compute: Computes it.
        lease: What the global generators may be set by; of its own if it is seeded, so that it ends with the waiting.
        begun: Whether the thread has taken it.
        done: Whether it is computed.
        outcome: Then, until it is taken, what came out.
        left: The generators as the caller had them when it last stopped waiting.
        moved: The names of those that moved from its beginning on, as far as they were watched.
    """

    task: Task
    compute: Callable[[], Outcome]
    seeded: bool
    lease: Lease | None
    begun: bool = False
    done: bool = False
    outcome: Outcome = (None, None)
    left: Generators | None = None
    moved: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Compute it, in its worker's thread."""
        work_here.lease, this_thread.alone = self.lease, True
        self.outcome = self.compute()
        work_here.lease, this_thread.alone = None, False
        with turns.lock:
            self.done = True
            turns.tell()

    def wait(self, errands: "dict[int, Errand]", worker: int, deadline: float | None) -> None:
        """Have a worker's thread find it, wait until it is done, and leave the generators as they are now.

        Raises:
            OverLimit: It is not done by the deadline.
        """
        with InterruptsHeld() as held:
            callers = Generators()
            if self.left is not None:
                self.moved += self.left.moved()
            with turns.lock:
                errands[worker] = self
                turns.tell()
            try:
                with held.let():
                    if not turns.wait_for(lambda: self.done, deadline):
                        raise OverLimit
            finally:
                if self.seeded and self.lease is not None:
                    self.lease.end()
                self.left, moved = callers, callers.moved()
                if moved:  # else a number that is drawn from now on shows
                    self.moved += moved
                    callers.restore()

    def take(self) -> Outcome:
        """Return the outcome, and hold it no longer: an error's traceback holds what holds this."""
        outcome, self.outcome = self.outcome, (None, None)
        return outcome
