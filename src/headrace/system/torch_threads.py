"""How many threads torch computes with: sums over several are rounded otherwise, so a batch is computed with one.

The number belongs to the thread that sets it. Torch also keeps one for the process, for threads that start later.
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
    """Have torch compute with one thread, as in workers, and with as many as before afterwards."""
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
    """Have torch compute with so many threads in this one, which has just begun; others keep the process's number."""
    with _setting:
        of_process = torch.get_num_threads()
        if of_process != number:
            torch.set_num_threads(number)
            another = threading.Thread(target=torch.set_num_threads, args=(of_process,))
            another.start()
            another.join()


def _forget_threads() -> None:
    """Begin anew in a forked process, where nobody else would release the lock."""
    global _setting  # noqa: PLW0603 - of the process
    _setting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
