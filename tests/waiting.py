"""Waiting for what happens in the background, with a limit."""

import threading

LIMIT_S = 20.0


def wait_for_reapers() -> None:
    """Wait until the workers of closed pools have been reaped, or have ended if they are threads."""
    for thread in threading.enumerate():
        if thread.name.startswith("headrace-"):
            thread.join(LIMIT_S)
