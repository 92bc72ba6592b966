"""Ctrl-C at a convenient time: what must not be done by halves is done first."""

# The public module wraps every call in enumerations, at ten times the cost.
import _signal as signal  # type: ignore[import-not-found]
import os
import threading
from types import FrameType, TracebackType
from typing import Any

_main = threading.main_thread().ident
"""The main thread: asking each time takes as long as all the rest of a block."""


def _become_main() -> None:
    """Make the thread that forks the child's main one; blocks of the one that was are not in the child."""
    global _main  # noqa: PLW0603 - asked for too often to be looked up anywhere
    if _main != threading.get_ident():
        _main = threading.get_ident()
        _leave_blocks()


def _leave_blocks() -> None:
    """Give interrupts back to whom they had before the blocks that hold them."""
    handler = signal.getsignal(signal.SIGINT)
    while isinstance(owner := getattr(handler, "__self__", None), InterruptsHeld):
        handler = owner._before
        signal.signal(signal.SIGINT, handler)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_become_main)


class InterruptsHeld:
    """A block at whose end, rather than in whose middle, a Ctrl-C raises; not to be nested around waiting.

    A class rather than a generator, whose own lines an interrupt could hit. Only the main thread is ever interrupted.
    """

    __slots__ = ("_before", "_frame")

    def __enter__(self) -> "InterruptsHeld":
        self._frame: FrameType | None = None
        self._before: Any = None
        if threading.get_ident() == _main:
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._note)
        return self

    def let(self) -> "InterruptsLet":
        """Return a block within this one in which a Ctrl-C raises: waiting, or the user's own code."""
        return InterruptsLet(self)

    def _note(self, _: int, frame: FrameType | None) -> None:
        self._frame = frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._frame is not None:
                self._before(signal.SIGINT, self._frame)


class InterruptsLet:
    """A block within `InterruptsHeld` that a Ctrl-C ends; whatever follows it there is done before that goes on.

    One that comes before the interrupts are held again has raised, and no other is expected at once.
    """

    __slots__ = ("_held",)

    def __init__(self, held: InterruptsHeld) -> None:
        self._held = held

    def __enter__(self) -> None:
        held = self._held
        if held._before is not None:
            signal.signal(signal.SIGINT, held._before)
            frame, held._frame = held._frame, None
            if frame is not None:
                held._before(signal.SIGINT, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held._before is not None:
            signal.signal(signal.SIGINT, self._held._note)


class Interruptible:
    """A worker's work: only within it a Ctrl-C raises, even if the process was forked inside of an `InterruptsHeld`."""

    def __enter__(self) -> None:
        _leave_blocks()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
