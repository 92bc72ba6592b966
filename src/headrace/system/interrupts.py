"""Ctrl-C at a convenient time: what must not be done by halves is done first."""

# The public module wraps every call in enumerations, at ten times the cost.
import _signal as signal  # type: ignore[import-not-found]
import _thread
import atexit
import functools
import os
import threading
import weakref
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

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

    def allowed(self) -> "InterruptsAllowed":
        """Return a block within this one in which a Ctrl-C raises: waiting, or the user's own code."""
        return InterruptsAllowed(self)

    def _note(self, _: int, frame: FrameType | None) -> None:
        self._frame = frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self._frame is not None:
                self._before(signal.SIGINT, self._frame)


class InterruptsAllowed:
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


class Droppable:
    """Does something when the last reference to it is dropped, or when the interpreter ends.

    In a `__del__` an interrupt is swallowed, even at its first line, and what follows is not done. And when modules are
    torn down at the interpreter's end, what it needs is gone.
    """

    __slots__ = ("__dict__", "_guard")
    _guard: Generator[None, None, None]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make the object, and what outlives it for a moment."""
        self, same = object.__new__(cls), object.__new__(cls)
        same.__dict__ = self.__dict__
        self._guard = guard = _guarding(same)  # no attribute like others, which that holds
        next(guard)
        _end_guards_at_exit()
        _guards.add(guard)
        return self

    def _dropped(self) -> None:
        """Do it; called on another object with the same attributes, and again where an interrupt came."""
        raise NotImplementedError


class Living(Generic[T]):
    """Objects while they live. A `WeakSet` takes out those that die by code in which an interrupt is swallowed."""

    def __init__(self) -> None:
        self._references: set[weakref.ref[T]] = set()

    def add(self, one: T) -> None:
        """Add one."""
        self._references.add(weakref.ref(one, self._references.discard))

    def __iter__(self) -> Iterator[T]:
        return (one for reference in list(self._references) if (one := reference()) is not None)


_guards = Living[Generator[None, None, None]]()


def _guarding(dropped: Droppable) -> Generator[None, None, None]:
    """Wait until this generator ends, or is itself dropped: all that it then does is within its `try`."""
    missed = False
    try:
        yield
    finally:
        try:
            try:
                dropped._dropped()
            except KeyboardInterrupt:
                missed = True
                dropped._dropped()
        except KeyboardInterrupt:
            missed = True
        if missed:  # it is to come again where it is not swallowed; and after a call it might come here
            for _ in iter(_thread.interrupt_main, None):
                pass


@functools.cache
def _end_guards_at_exit() -> None:
    # The first time there is something to drop: before what was registered until then.
    atexit.register(_end_guards)


def _end_guards() -> None:
    with ExitStack() as each:
        for guard in _guards:
            each.callback(guard.close)


class Interruptible:
    """A worker's work: only within it a Ctrl-C raises, even if the process was forked inside of an `InterruptsHeld`."""

    def __enter__(self) -> None:
        _leave_blocks()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
