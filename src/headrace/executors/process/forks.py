"""Local processes forked one right after the other.

After a fork, each page that the rank writes to is copied. What Python does between two forks therefore costs a fifth of
a fork. All of it is done before the first fork or after the last.
"""

import atexit
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

_RUNS_EXIT_FUNCTIONS = hasattr(popen_fork, "atexit")
"""Whether multiprocessing's forked processes run exit functions of their own, as from Python 3.13 on."""

_lock = Lock()
_forker = 0
"""The thread that runs `fork_all`; 0 if none does."""

_being_forked: "list[_Popen]" = []
"""The processes that it forks."""


class Process(multiprocessing.Process):
    """A process for `fork_all`. Once started it behaves like any other process of multiprocessing.

    Args:
        context: The multiprocessing context whose processes it replaces.
        how: The arguments of such a process.
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
    """Tell whether a `Process` can replace the processes of a multiprocessing context."""
    known = context.Process in (multiprocessing.Process, ForkProcess)
    return (
        context.get_start_method() == "fork" and known and sys.version_info < (3, 14)
    )  # 3.14 does more in a new process


def fork_all(starting: Sequence[tuple[Process, Sequence[socket]]]) -> None:
    """Fork processes. The sockets of each are closed in this process and in the others.

    Raises:
        OSError: The system refuses a process, or descriptors. The processes forked before that have been started.
    """
    global _forker  # noqa: PLW0603 - one thread of the process forks at a time
    pids: list[int] = []
    with _lock:
        try:
            if current_process().daemon:
                raise AssertionError("daemonic processes are not allowed to have children")
            for process, sockets in starting:
                _being_forked.append(_Popen(process, sockets))
            _forker = get_ident()
            if gc.isenabled():
                gc.collect(0)  # or each child would do it soon, and collecting writes to every object
            for process, _ in starting:
                util._flush_std_streams()  # type: ignore[attr-defined]
                pid = os.fork()
                if not pid:
                    _run_child(process, _being_forked.pop(len(pids)))
                pids.append(pid)
        finally:
            _forker = 0
            popens = [*_being_forked]
            _being_forked.clear()
            _close([popen.rank_lives for popen in popens])
            for _, sockets in starting:
                _close(sockets)
            for (process, _), popen, pid in zip(starting, popens, pids, strict=False):
                popen.pid = pid
                process.popen = popen
                process.start()


def _run_child(process: Process, popen: "_Popen") -> NoReturn:
    """Run one of the processes, in the child."""
    code = 1
    try:
        os.sched_yield()  # to the rank, if it waits for this CPU: it has more to fork
        gc.freeze()  # inherited objects stay shared as long as the garbage collector does not visit them
        os.close(popen.sentinel)
        _forget_others()
        if _RUNS_EXIT_FUNCTIONS:
            atexit._clear()
            atexit.register(util._exit_function)  # type: ignore[attr-defined]
        code = process._bootstrap(parent_sentinel=popen.rank_lives)  # type: ignore[attr-defined]
    finally:
        if _RUNS_EXIT_FUNCTIONS:
            atexit._run_exitfuncs()
        os._exit(code)


def _forget_others() -> None:
    """Close the descriptors of the processes being forked, in a child that is none of them."""
    global _forker, _lock
    for popen in _being_forked:
        _close([popen.sentinel, popen.rank_lives, *popen.sockets])
    _being_forked.clear()
    _forker, _lock = 0, Lock()


def _in_any_child() -> None:
    if get_ident() != _forker:  # another thread forked this child during `fork_all`
        _forget_others()


class _Popen(popen_fork.Popen):
    """The object that multiprocessing keeps for a process, made before the process exists.

    Attributes:
        sockets: The sockets of the process.
        sentinel: The descriptor that tells the rank of the death of the process.
        rank_lives: The descriptor that tells the process of the death of the rank.
    """

    def __init__(self, process: Process, sockets: Sequence[socket]) -> None:
        self.sockets = sockets
        super().__init__(process)

    def _launch(self, process: Any) -> None:
        self.sentinel, self.rank_lives = (one.detach() for one in socketpair())
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))


def close_rank_end(process: BaseProcess) -> None:
    """Close, in another child, the rank's end of the socket that tells `process` that the rank lives."""
    finalizer = getattr(getattr(process, "_popen", None), "finalizer", None)
    if finalizer is not None and finalizer.still_active():  # the finalizer itself runs in the rank only
        _close(finalizer._args)


def end_with_rank(rank_lives: int) -> bool:
    """Have the kernel kill this worker process when the rank ends, even during C code; return whether the rank lives.

    The rank has ended when nobody holds the other end of the socket, which carries no data. SIGKILL is used since a
    signal with a handler waits until C code returns. Children of this process inherit the descriptor and get no signal.

    Args:
        rank_lives: The end of the socket that multiprocessing gave this process.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # the worker then notices it between two tasks
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
