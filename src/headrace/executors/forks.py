"""Local processes forked one right after the other.

After a fork the rank's pages are copied when it writes to them, so that what Python does between two forks costs it a
fifth of a fork. All of that is done before the first, or after the last.
"""

import gc
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import current_process, popen_fork, util
from multiprocessing.context import ForkProcess
from socket import socket, socketpair
from typing import Any, NoReturn


class Process(multiprocessing.Process):
    """A process for `fork_all`; to whoever holds it later it is one like any other.

    Args:
        context: The multiprocessing context that would make one otherwise.
        how: What its processes take.
    """

    def __init__(self, context: Any, **how: Any) -> None:
        super().__init__(**how)
        self._start_method = context.Process._start_method
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
    if current_process().daemon:
        raise AssertionError("daemonic processes are not allowed to have children")
    popens: list[_Popen] = []
    pids: list[int] = []
    collects = gc.isenabled()
    gc.disable()  # it writes to the objects that it looks at
    try:
        for process, sockets in starting:
            popens.append(_Popen(process, sockets))
        for process, _ in starting:
            pid = os.fork()
            if not pid:
                _live(process, popens.pop(len(pids)), popens, collects)
            pids.append(pid)
    finally:
        if collects:
            gc.enable()
        _close([popen.rank_lives for popen in popens])
        for _, sockets in starting:
            _close(sockets)
        for (process, _), popen, pid in zip(starting, popens, pids, strict=False):
            popen.pid = pid
            process.popen = popen
            process.start()


def _live(process: Process, popen: "_Popen", others: "Sequence[_Popen]", collects: bool) -> NoReturn:
    """Be one of the processes."""
    code = 1
    try:
        gc.freeze()  # what was inherited is shared for as long as nobody looks through it for garbage
        if collects:
            gc.enable()
        _close([popen.sentinel])
        for other in others:
            _close([other.sentinel, other.rank_lives, *other.sockets])
        code = process._bootstrap(parent_sentinel=popen.rank_lives)  # type: ignore[attr-defined]
    finally:
        os._exit(code)


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


def _close(descriptors: Sequence[int | socket]) -> None:
    for one in descriptors:
        os.close(one) if isinstance(one, int) else one.close()
