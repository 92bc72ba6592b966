"""Batches that a worker thread computes exclusively while the caller waits with a limit."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace.executors.thread.compute_lock import DeadlinePassed, compute_lock, this_thread
from headrace.randomness import Generators, Lease, thread_randomness
from headrace.system.interrupts import InterruptsHeld
from headrace.types import Task

Outcome = tuple[Any, BaseException | None]
"""A batch, or the error in its place."""


@dataclass(eq=False)
class DelegatedBatch:
    """A batch that a worker's thread computes exclusively while the caller waits. After the limit it is still computed.

    Attributes:
        task: The task of the batch.
        compute: Computes it.
        seeded: Whether it is computed with seeded global generators.
        lease: The permission to set the global generators. A seeded batch has one of its own, which ends when the
            caller stops waiting.
        started: Whether the thread has taken it.
        done: Whether it is computed.
        outcome: The result, from `done` until it is taken.
        generators: The state of the caller's generators when it last stopped waiting.
        moved: The names of the generators that moved since the start, as far as they were watched.
    """

    task: Task
    compute: Callable[[], Outcome]
    seeded: bool
    lease: Lease | None
    started: bool = False
    done: bool = False
    outcome: Outcome = (None, None)
    generators: Generators | None = None
    moved: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Compute it, in its worker's thread."""
        thread_randomness.lease, this_thread.exclusive = self.lease, True
        self.outcome = self.compute()
        thread_randomness.lease, this_thread.exclusive = None, False
        with compute_lock.mutex:
            self.done = True
            compute_lock.notify_all()

    def wait(self, delegated: "dict[int, DelegatedBatch]", worker: int, deadline: float | None) -> None:
        """Give it to a worker's thread, wait until it is done, and leave the caller's generators unchanged.

        Raises:
            DeadlinePassed: It is not done by the deadline.
        """
        with InterruptsHeld() as held:
            callers = Generators()
            if self.generators is not None:
                self.moved += self.generators.moved()
            with compute_lock.mutex:
                delegated[worker] = self
                compute_lock.notify_all()
            try:
                with held.allowed():
                    if not compute_lock.wait_for(lambda: self.done, deadline):
                        raise DeadlinePassed
            finally:
                if self.seeded and self.lease is not None:
                    self.lease.end()
                self.generators, moved = callers, callers.moved()
                if moved:  # restored, so that the next comparison shows later draws
                    self.moved += moved
                    callers.restore()

    def take(self) -> Outcome:
        """Return the outcome and drop it: the traceback of an error refers to frames that refer to this object."""
        outcome, self.outcome = self.outcome, (None, None)
        return outcome
