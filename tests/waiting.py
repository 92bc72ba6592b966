"""Waiting for what happens in the background, with a limit."""

import threading
import time
from collections.abc import Callable, Iterable

import psutil

from headrace.executors.process.pool import let_workers_end

LIMIT_S = 60.0


def wait_for_reapers() -> None:
    """Wait until the workers of closed pools have been reaped, or have ended if they are threads."""
    let_workers_end(LIMIT_S)
    for thread in threading.enumerate():
        if thread.name.startswith("headrace-"):
            thread.join(LIMIT_S)


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait until another process has brought a condition about; nothing but looking tells."""
    deadline = time.monotonic() + limit_s
    look_again = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {limit_s} s"
        look_again.wait(0.01)


def wait_until_ended(processes: Iterable[psutil.Process], limit_s: float = LIMIT_S) -> None:
    """Wait until processes that are not this one's children have ended: init reaps them in its own time."""
    wait_until(lambda: all(map(_has_ended, processes)), limit_s)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
