"""The rank's view of one worker process: its socket, its unanswered tasks, its shared memory, and how it ended."""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import Signals, strsignal

from headrace.errors import WorkerDied
from headrace.executors.dispatch.dispatcher import Dispatcher
from headrace.executors.dispatch.peer import Peer
from headrace.executors.dispatch.rules import MOST_BUNDLE
from headrace.executors.link.wire import LIVENESS_S, Assigned, Wire
from headrace.memory.codec import is_inline

GRACE_S = 5.0
"""How long all workers together may take to end before they are terminated, in seconds; then before they are killed."""

_STATES = {"R": "running", "S": "sleeping", "D": "in disk sleep", "T": "stopped", "t": "stopped by a debugger"}


class ProcessPeer(Peer[Assigned]):
    """One worker process: its socket, and the tasks that it has not answered, oldest first.

    Attributes:
        process: The process.
        wire: The sockets to it.
        started: Whether the process was started.
        ready: Whether it has unpickled its work; then the next worker may be started.
        writes: Whether the rank waits until it can send more.
    """

    def __init__(
        self,
        worker: int,
        process: BaseProcess,
        ends: tuple[socket.socket, socket.socket],
        false_starts: int,
        patience_s: float | None,
        dispatcher: Dispatcher,
    ) -> None:
        super().__init__(worker, false_starts, patience_s)
        self.takes = True  # also before the process is started: tasks wait in its socket
        self.process = process
        self.wire = Wire(*ends, self._receive)
        self.started = self.ready = self.writes = False
        self._dispatcher = dispatcher
        self._stopped_s: float | None = None

    def _receive(self, parts: list[bytearray]) -> None:
        # An empty message comes when it has unpickled its work, if that had to be, and when it is set up for tasks.
        if not parts:
            if self.ready:
                self._dispatcher.set_up(self)
            self.ready = True
            return
        wire, future = self.wire, self.unanswered[0]
        task_s = wire.check(parts, self.process.pid)
        if future.bound is not None:  # nothing is decided by how long it takes
            wire.land(future, parts)
            self.unanswered.popleft().holders.clear()
            return
        self.note_speed(task_s, MOST_BUNDLE if is_inline(parts) else 1)
        was_done = future.done()
        wire.land(future, parts)  # and is still owed where that is refused
        self._dispatcher.answered(future, self, was_done)

    def stopped(self) -> bool:
        """Tell whether the process has been in the state "stopped" for some time, at two calls in a row or more.

        One call is not enough. When the rank and its workers are stopped and continued together, as by Ctrl-Z and `fg`,
        the workers look stopped for a moment.
        """
        now_s, before_s = time.monotonic(), self._stopped_s
        self._stopped_s = None
        if state_of(self.process.pid) != "T":
            return False
        self._stopped_s = now_s if before_s is None else before_s
        return now_s - self._stopped_s >= LIVENESS_S / 2

    def kill(self) -> None:
        """Kill the process of a lost worker, if it still exists: another is about to take its worker number."""
        # Where SIGCHLD is ignored, another process may have its pid by now. The sentinel shows whether it has ended.
        if self.process.pid is not None and not connection.wait([self.process.sentinel], 0):
            self.process.kill()

    def close(self) -> None:
        """Close the sockets, and drop the futures: they would be in a reference cycle."""
        self.wire.close()
        self.drop_tasks()

    @property
    def name(self) -> str:
        """Its number and process."""
        return f"worker {self.worker} (pid {self.process.pid})"

    def __str__(self) -> str:
        state = state_of(self.process.pid)
        what = f", {_STATES.get(state, f'in state {state}')}" if state else ""
        return f"worker {self.worker} (pid {self.process.pid}{what})"


def end_workers(peers: Sequence[ProcessPeer], lost: Sequence[BaseProcess]) -> None:
    """Tell workers to end, and wait for them and for the processes of lost workers."""
    for peer in peers:
        peer.close()
    processes = dict.fromkeys((*(peer.process for peer in peers), *lost))  # one that is not replaced is in both
    _reap([one for one in processes if one.pid is not None])


def _reap(processes: Sequence[BaseProcess]) -> None:
    """Wait for all processes that were told to end; terminate, then kill, those that do not."""
    waiting = list(processes)
    for hurry in (None, "terminate", "kill"):
        for process in waiting if hurry else ():
            getattr(process, hurry or "")()
        deadline = time.monotonic() + GRACE_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            # Where SIGCHLD is ignored, only the sentinel tells that a process has ended.
            ended = connection.wait([process.sentinel for process in waiting], left)
            waiting = [process for process in waiting if process.sentinel not in ended and not _has_ended(process)]
    for process in processes:
        # The sentinel fires a moment before there is an exit status. The process object is not closed: at the exit of
        # the interpreter, multiprocessing would raise for a closed one.
        if connection.wait([process.sentinel], LIVENESS_S):
            _has_ended(process, at_once=False)
        process.join(0)


def _has_ended(process: BaseProcess, *, at_once: bool = True) -> bool:
    """Tell whether a process has ended, and reap it if so.

    Its exit code is noted before it is reaped. The user may ask the same object in another thread, and multiprocessing
    takes a process without an exit code for a living one if somebody else has reaped it.

    Args:
        process: A process that was started.
        at_once: Whether to return at once. Otherwise the function waits until the process ends.
    """
    popen = process._popen  # type: ignore[attr-defined]
    if type(popen).poll is not Popen.poll or not hasattr(os, "waitid"):  # a forkserver's process, or macOS
        return not process.is_alive()
    if popen.returncode is None:
        with suppress(ChildProcessError):  # reaped in another thread, or by the kernel where SIGCHLD is ignored
            how = os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT | (os.WNOHANG if at_once else 0))
            if how is None:
                return False
            popen.returncode = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
            os.waitpid(popen.pid, os.WNOHANG)
    return True


def exit_code(process: BaseProcess) -> int | None:
    """Wait for a process that is ending, and return its exit code; None if it was not started, or does not end."""
    if process.pid is not None:
        process.join(GRACE_S)
    return process.exitcode


def how_ended(code: int | None) -> str:
    """Word an exit code, as the end of a sentence that begins with the process."""
    if code is not None and code < 0:
        return f"is killed by signal: {strsignal(-code) or Signals(-code).name}"
    return f"exited unexpectedly with exit code {code}"


def death_error(process: BaseProcess) -> WorkerDied:
    """Wait for a process that is ending, and return torch's error about its death."""
    code = exit_code(process)
    hint = "" if code is not None and code < 0 else "Rerunning with num_workers=0 may show where."
    if code == -Signals.SIGKILL:
        hint = "The kernel kills with SIGKILL when memory runs out."
    error = WorkerDied(f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly")
    error.__cause__ = RuntimeError(f"DataLoader worker (pid {process.pid}) {how_ended(code)}. {hint}".rstrip())
    return error


def state_of(pid: int | None) -> str:
    """Return the kernel's letter for the state of a process, such as "R", "S", "D" or "T"; "" where it is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
