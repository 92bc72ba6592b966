"""Ctrl-C, as tests need it: at a moment nobody chose, or at exactly the k-th executed line; and a dataset to read."""

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Any

import torch


class Small(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are just large enough to travel in a slot."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.full((8200,), index)


class Interrupter:
    """Sends SIGINT to the main thread after a delay; a thread of its own, since a timer's signal is pytest's."""

    def __init__(self) -> None:
        self._delays_s: SimpleQueue[float | None] = SimpleQueue()
        self._cancelled, self._idle = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (delay_s := self._delays_s.get()) is not None:
            if not self._cancelled.wait(delay_s):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self._idle.set()

    def begin(self, delay_s: float) -> None:
        """Interrupt in so many seconds."""
        self._cancelled.clear()
        self._idle.clear()
        self._delays_s.put(delay_s)

    def end(self) -> None:
        """Return when no interrupt can come any more; one that is under way may come in here."""
        self._cancelled.set()
        self._idle.wait()

    def close(self) -> None:
        """End the thread."""
        self._delays_s.put(None)
        self._thread.join()


@contextmanager
def default_interrupts() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, as it does unless a shell started the tests in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class AtLine:
    """Counts the lines executed in files under some folders; interrupts at one of them.

    Args:
        line: Which, from 1.
        folders: Parts of the paths of the files whose lines count.

    Attributes:
        lines: How many have been executed.
        place: Where the interrupt came, or None.
    """

    def __init__(self, line: int, folders: Sequence[str]) -> None:
        self.lines = 0
        self.place: str | None = None
        self._line, self._folders = line, folders

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Count from here, and in this process alone."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._count if any(folder in frame.f_code.co_filename for folder in self._folders) else None

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._line:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._count


os.register_at_fork(after_in_child=lambda: sys.settrace(None))
