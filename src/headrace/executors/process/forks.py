"""Local processes forked one right after the other.

After a fork the rank's pages are copied when it writes to them, so that what Python does between two forks costs it a
fifth of a fork. All of that is done before the first, or after the last.
"""

import fcntl
import gc
import multiprocessing
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import current_process, popen_fork, util
from multiprocessing.context import ForkProcess
from multiprocessing.process import BaseProcess
from signal import SIGKILL
from socket import socket, socketpair
from threading import Lock, get_ident
from typing import Any, NoReturn

_lock = Lock()
_forker = 0
"""Which thread is in the middle of `fork_all`; 0 if none is."""

_underway: "list[_Popen]" = []
"""What it is forking."""


class Process(multiprocessing.Process):
    """A process for `fork_all`; to whoever holds it later it is one like any other.

    Args:
        context: The multiprocessing context that would make one otherwise.
        how: What its processes take.
    """

    def __init__(self, context: Any, **how: Any) -> None:
        super().__init__(**how)
        self._start_method = context.Process._start_method
        self.name = self.name.replace("Process", context.Process.__name__, 1)
        self.popen: _Popen | None = None

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 - the name that multiprocessing calls when it is started
        return process.popen


def forks_together(context: Any) -> bool:
    """Tell whether what a multiprocessing context makes may as well be a `Process` from here."""
    known = context.Process in (multiprocessing.Process, ForkProcess)
    return context.get_start_method() == "fork" and known and sys.version_info < (3, 14)  # a new one does more there


def fork_all(starting: Sequence[tuple[Process, Sequence[socket]]]) -> None:
    """Fork processes, each with sockets of its own, which are closed here and in the others.

    Raises:
        OSError: The system refuses a process, or descriptors; those that there are have been started.
    """
    global _forker  # noqa: PLW0603 - of the process: it is forked by one thread at a time
    pids: list[int] = []
    with _lock:
        try:
            if current_process().daemon:
                raise AssertionError("daemonic processes are not allowed to have children")
            for process, sockets in starting:
                _underway.append(_Popen(process, sockets))
            _forker = get_ident()
            if gc.isenabled():
                gc.collect(0)  # which each process would have to do soon, and it writes to what it looks at
            for process, _ in starting:
                util._flush_std_streams()  # type: ignore[attr-defined]
                pid = os.fork()
                if not pid:
                    _live(process, _underway.pop(len(pids)))
                pids.append(pid)
        finally:
            _forker = 0
            popens = [*_underway]
            _underway.clear()
            _close([popen.rank_lives for popen in popens])
            for _, sockets in starting:
                _close(sockets)
            for (process, _), popen, pid in zip(starting, popens, pids, strict=False):
                popen.pid = pid
                process.popen = popen
                process.start()


def _live(process: Process, popen: "_Popen") -> NoReturn:
    """Be one of the processes."""
    code = 1
    try:
        os.sched_yield()  # to the rank, should it wait for this very CPU: it has more to fork
        gc.freeze()  # what was inherited is shared for as long as nobody looks through it for garbage
        os.close(popen.sentinel)
        _forget_others()
        code = process._bootstrap(parent_sentinel=popen.rank_lives)  # type: ignore[attr-defined]
    finally:
        os._exit(code)


def _forget_others() -> None:
    """Close what belongs to the processes that are being forked, in one that is none of them."""
    global _forker, _lock
    for popen in _underway:
        _close([popen.sentinel, popen.rank_lives, *popen.sockets])
    _underway.clear()
    _forker, _lock = 0, Lock()


def _in_any_child() -> None:
    if get_ident() != _forker:  # another thread's, in the middle of `fork_all`
        _forget_others()


class _Popen(popen_fork.Popen):
    """What multiprocessing keeps of a process, made before there is one.

    Attributes:
        sockets: The process's own.
        sentinel: At which the rank sees the process die.
        rank_lives: At which the process sees the rank die.
    """

    def __init__(self, process: Process, sockets: Sequence[socket]) -> None:
        self.sockets = sockets
        super().__init__(process)

    def _launch(self, process: Any) -> None:
        self.sentinel, self.rank_lives = (one.detach() for one in socketpair())
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))


def close_rank_end(process: BaseProcess) -> None:
    """Close the rank's end of what tells a process that the rank lives, in another one that the rank has forked."""
    finalizer = getattr(getattr(process, "_popen", None), "finalizer", None)
    if finalizer is not None and finalizer.still_active():  # which does nothing but in the rank
        _close(finalizer._args)


def end_with_rank(rank_lives: int) -> bool:
    """Have the kernel end this process, a worker, whatever it is at, when the rank is gone; return whether it is there.

    That is when nobody holds the other end any more, through which nothing is ever sent. Signals that have a handler
    wait for C code to end. What user code forks here inherits the descriptor, and gets no signal.

    Args:
        rank_lives: The end that multiprocessing gave this process.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # the worker then finds out when it has nothing to do
            fcntl.fcntl(rank_lives, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(rank_lives, fcntl.F_SETSIG, SIGKILL)
            fcntl.fcntl(rank_lives, fcntl.F_SETFL, fcntl.fcntl(rank_lives, fcntl.F_GETFL) | os.O_ASYNC)
    ended = select.poll()
    ended.register(rank_lives, select.POLLIN)
    return not ended.poll(0)


def _close(descriptors: Sequence[int | socket]) -> None:
    for one in descriptors:
        os.close(one) if isinstance(one, int) else one.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_any_child)
