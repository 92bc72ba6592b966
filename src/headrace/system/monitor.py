"""Waiting until something is true that other threads change, at any moment of which a Ctrl-C may come."""

import threading
import time
from collections.abc import Callable

from headrace.system.interrupts import InterruptsHeld


class Monitor:
    """A mutex, and waiting for what it protects. It is no `Condition`: a Ctrl-C in its methods would leave it locked.

    Attributes:
        mutex: Held while anything that it protects is read or changed.
    """

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self._waiters: list[threading.Lock] = []

    def notify_all(self) -> None:
        """Wake all threads in `wait_for`; call it with the mutex held."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()

    def wait_for(self, predicate: Callable[[], bool], deadline: float | None = None) -> bool:
        """Wait until a predicate, called with the mutex held, is true; return whether it was by the deadline."""
        while True:
            with InterruptsHeld(), self.mutex:
                if predicate():
                    return True
                waiter = threading.Lock()
                waiter.acquire()
                self._waiters.append(waiter)
            if not waiter.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
                return False
