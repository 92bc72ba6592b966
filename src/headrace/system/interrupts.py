"""Ctrl-C at a safe time: code that must not be interrupted finishes first."""

import _thread
import atexit
import functools
import os
import threading
import weakref

# The public module wraps every call in enumerations, at ten times the cost.
from _signal import SIG_IGN, SIGINT, getsignal, signal  # type: ignore[import-not-found]
from _thread import get_ident
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")

_main = threading.main_thread().ident
"""The main thread. Asking for it each time would take as long as the rest of a block."""


def _become_main() -> None:
    """In a forked child, note its main thread: the one that forked. Leave the blocks of the former main thread."""
    global _main  # noqa: PLW0603 - read too often for an attribute
    if _main != get_ident():
        _main = get_ident()
        _leave_blocks()


def _leave_blocks() -> None:
    """Restore the signal handler that was set before all `InterruptsHeld` blocks."""
    handler = getsignal(SIGINT)
    while isinstance(owner := getattr(handler, "__self__", None), InterruptsHeld):
        handler = owner._before
        signal(SIGINT, handler)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_become_main)


class InterruptsHeld:
    """A block that delays Ctrl-C: it raises at the end of the block. Do not wait inside of it.

    This is a class since a Ctrl-C could come in the lines of a generator. Only the main thread is ever interrupted.
    """

    __slots__ = ("_before", "_frame")
    _before: Any
    _frame: FrameType | None

    def __enter__(self) -> "InterruptsHeld":
        self._frame = self._before = None
        if get_ident() == _main:
            before = getsignal(SIGINT)
            if callable(before):
                self._before = before
                signal(SIGINT, self._note)
        return self

    def allowed(self) -> "InterruptsAllowed":
        """Return a block within this one in which a Ctrl-C raises: for waiting, or for the user's code."""
        return InterruptsAllowed(self)

    def _note(self, _: int, frame: FrameType | None) -> None:
        self._frame = frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal(SIGINT, self._before)
            if self._frame is not None:
                self._before(SIGINT, self._frame)


class InterruptsAllowed:
    """A block within `InterruptsHeld` in which a Ctrl-C raises. A `finally` around it then runs with interrupts held.

    A Ctrl-C may also raise just before `__exit__` holds interrupts again. A second one right after it is not expected.
    """

    __slots__ = ("_held",)

    def __init__(self, held: InterruptsHeld) -> None:
        self._held = held

    def __enter__(self) -> None:
        held = self._held
        if held._before is not None:
            signal(SIGINT, held._before)
            frame, held._frame = held._frame, None
            if frame is not None:
                held._before(SIGINT, frame)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held._before is not None:
            signal(SIGINT, self._held._note)


class Droppable:
    """Calls `_dropped` when the last reference to the object is dropped, or when the interpreter exits.

    A `__del__` is not safe: a Ctrl-C in it is lost, and its remaining lines do not run. At the exit of the interpreter,
    modules that it needs may be gone.
    """

    __slots__ = ("__dict__", "_guard")
    _guard: Generator[None, None, None]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make the object, and a second one with the same attributes, on which `_dropped` is called."""
        self, same = object.__new__(cls), object.__new__(cls)
        same.__dict__ = self.__dict__
        self._guard = guard = _guarding(same)  # in a slot, since the guard refers to `__dict__`
        next(guard)
        _end_guards_at_exit()
        _guards.add(guard)
        return self

    def _dropped(self) -> None:
        """Release everything that the object holds.

        `self` is then another object of the same class with the same attributes: the one that was dropped is gone. If a
        Ctrl-C interrupts the call, it is made once more.
        """
        raise NotImplementedError


class Living(Generic[T]):
    """A set of weak references. A `WeakSet` removes dead objects in Python code, in which a Ctrl-C is lost."""

    def __init__(self) -> None:
        self._references: set[weakref.ref[T]] = set()

    def add(self, one: T) -> None:
        """Add an object."""
        self._references.add(weakref.ref(one, self._references.discard))

    def __iter__(self) -> Iterator[T]:
        return (one for reference in list(self._references) if (one := reference()) is not None)


_guards = Living[Generator[None, None, None]]()


def _guarding(dropped: Droppable) -> Generator[None, None, None]:
    """Wait until this generator is closed or dropped, then call `_dropped`, all within a `try`."""
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
        if missed:  # raise it again where it is not lost; no line may follow the call, since it might raise there
            for _ in iter(_thread.interrupt_main, None):
                pass


@functools.cache
def _end_guards_at_exit() -> None:
    # Registered with the first such object, to run before all exit handlers that were registered earlier.
    atexit.register(_end_guards)


def _end_guards() -> None:
    with ExitStack() as each:
        for guard in _guards:
            each.callback(guard.close)


class Interruptible:
    """The block of a worker's work. A Ctrl-C raises only in it, even after a fork inside of an `InterruptsHeld`."""

    def __enter__(self) -> None:
        _leave_blocks()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal(SIGINT, SIG_IGN)
