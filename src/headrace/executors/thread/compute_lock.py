"""The lock of all threads that compute batches: many share it, or one thread has it exclusively."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace.system.interrupts import InterruptsHeld
from headrace.system.monitor import Monitor
from headrace.system.user_warnings import warn_user

_LONG_S = 30.0
"""After this time, in seconds, a warning names the threads that a batch waits for which must be computed alone."""


class DeadlinePassed(Exception):
    """What was waited for has not happened by the deadline."""


class ThisThread(threading.local):
    """The state of one thread.

    Attributes:
        info: What `get_worker_info` returns in it, if it is a worker.
        computing: Whether it is a worker in the middle of a batch.
        exclusive: Whether it computes exclusively: no other thread may begin a batch.
    """

    info: Any = None
    computing = False
    exclusive = False


this_thread = ThisThread()


class ComputeLock(Monitor):
    """A readers-writer lock, and the monitor of a pool's threads.

    Attributes:
        running: How many batches worker threads compute.
        paused: Whether no further batch may begin.
        busy: What worker threads compute: functions that name it, by thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        self.paused = False
        self.busy: dict[int, Callable[[], str]] = {}

    @contextmanager
    def exclusive(self, held: InterruptsHeld, deadline: float | None = None) -> Iterator[None]:
        """Keep other worker threads from computing. It may be nested.

        Raises:
            DeadlinePassed: Other threads did not finish by the deadline.
        """
        if this_thread.exclusive:
            yield
            return
        own = int(this_thread.computing)  # a loader inside a dataset: the batch of this thread waits, too
        with self.mutex:
            self._count(-own)
        try:
            with held.allowed():
                if not (self.wait_for(self._pause, deadline) and self._wait_for_others(deadline)):
                    raise DeadlinePassed
            yield
        finally:
            self._resume(own)

    def _wait_for_others(self, deadline: float | None) -> bool:
        """Wait until no thread computes a batch; name those that take long, once."""
        soon = time.monotonic() + _LONG_S
        if deadline is not None and deadline <= soon:
            return self.wait_for(lambda: not self.running, deadline)
        if self.wait_for(lambda: not self.running, soon):
            return True
        warn_user(
            f"a batch has waited {_LONG_S:.0f} s for other threads, since it must be computed alone: "
            f"{self.describe_busy()}. If one of these hangs, no loader with threads goes on in this process."
        )
        return self.wait_for(lambda: not self.running, deadline)

    def describe_busy(self) -> str:
        """Name what worker threads of all loaders compute now."""
        return "; ".join(name() for name in [*self.busy.values()])

    def _pause(self) -> bool:
        if not self.paused:
            self.paused = this_thread.exclusive = True
        return this_thread.exclusive

    def _resume(self, own: int) -> None:
        with self.mutex:
            if this_thread.exclusive:
                self.paused = this_thread.exclusive = False
            self._count(own)

    @contextmanager
    def shared(self, name: Callable[[], str]) -> Iterator[None]:
        """Compute a batch in this thread. `running` already counts it: it was raised when the batch was taken.

        Args:
            name: Names the thread and the batch.
        """
        this_thread.computing = True
        self.busy[threading.get_ident()] = name
        try:
            yield
        finally:
            this_thread.computing = False
            with self.mutex:
                del self.busy[threading.get_ident()]
                self._count(-1)

    def _count(self, change: int) -> None:
        self.running += change
        self.notify_all()


compute_lock = ComputeLock()
"""The one of this process."""


def forget_threads() -> None:
    """Reset the lock in a forked process: its threads are not there."""
    vars(this_thread).clear()
    compute_lock.__init__()  # type: ignore[misc]
