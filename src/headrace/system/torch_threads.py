"""The number of threads that torch computes with. Several threads round sums differently, so batches use one.

Each thread has its own number. Torch also keeps one for the process, for threads that start later.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.system.interrupts import InterruptsHeld

_setting = threading.Lock()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Make torch compute with one thread, as in workers; restore the number afterwards."""
    number = torch.get_num_threads()
    if number == 1:
        yield
        return
    with InterruptsHeld() as held:
        try:
            torch.set_num_threads(1)
            with held.allowed():
                yield
        finally:
            torch.set_num_threads(number)


def begin_with_torch_threads(number: int) -> None:
    """Set the number of torch's threads for this new thread; later threads keep the process's number."""
    with _setting:
        of_process = torch.get_num_threads()
        if of_process != number:
            torch.set_num_threads(number)
            another = threading.Thread(target=torch.set_num_threads, args=(of_process,))
            another.start()
            another.join()


def _forget_threads() -> None:
    """Make a new lock in a forked process, where nobody would release the old one."""
    global _setting  # noqa: PLW0603 - of the process
    _setting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
