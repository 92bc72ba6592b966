"""Workers as local processes. Each has a socket to the rank, and a second one to pass descriptors."""

import _thread
import atexit
import math
import multiprocessing
import os
import select
import socket
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import process as processes_of_python
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import Any, cast

import torch.multiprocessing
from torch._utils import cpu_count

from headrace.datasets.fork_safety import warn_before_fork
from headrace.executors.base import Executor, Pool, name_task
from headrace.executors.future import Future
from headrace.executors.link.frames import EMPTY_FRAME
from headrace.executors.link.lending import Lender
from headrace.executors.link.serving import Server, serve
from headrace.executors.link.wire import LIVENESS_S, MOST_DEATHS, MOST_FALSE_STARTS, Assigned, hang_up, no_answer
from headrace.executors.process.forks import Process, close_rank_end, end_with_rank, fork_all, forks_together
from headrace.executors.process.peer import Peer, death_error, described, end_workers
from headrace.memory.payload import Payload, receive
from headrace.memory.slots import Mapping, Ring, keep_freed_memory
from headrace.memory.unpicklable import unpicklable_part
from headrace.randomness import accelerated
from headrace.system.interrupts import Interruptible, InterruptsHeld
from headrace.types import Task
from headrace.worker.work import Work

_LAST_MOMENT_S = 1.0
"""How long the exit of the interpreter waits for all workers together, in seconds."""

_worker_ends: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""The workers' ends of sockets, for workers that are not started yet. Other forked processes must close their copies:
with an open copy, nobody would see that worker die. A worker's own ends are removed before it is forked."""

_endings: set[threading.Lock] = set()
"""One lock for each pool whose workers are ending in the background; it is released when they have ended."""

_processes: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()
"""The rank's workers. In a process forked from the rank, multiprocessing would terminate them at its exit."""


def _forget_workers() -> None:
    for end in list(_worker_ends):
        end.close()
    _endings.clear()
    for process in list(_processes):
        close_rank_end(process)
    processes_of_python._children.difference_update(_processes)  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)


@dataclass(frozen=True)
class ProcessExecutor(Executor):
    """Run work in local processes, one per worker: torch's own way, and the default where `num_workers` > 0."""

    parity = True

    def start(self, work: Work, workers: int, context: Any = None) -> Pool:
        """Start the processes by the context's start method.

        Raises:
            Exception: Whatever pickle raises where a start method other than fork must pickle the dataset.
        """
        with InterruptsHeld():
            return _ProcessPool(work, workers, torch.multiprocessing if context is None else context)


class _ProcessPool(Pool):
    def __init__(self, work: Work, workers: int, context: Any) -> None:
        self.work = work
        self.workers = workers
        self._together = forks_together(context)
        self._new_process = partial(Process, context) if self._together else context.Process
        self._payload: Payload | None = None
        self._owner = os.getpid()
        keep_freed_memory()  # for batches that hold bytes or text; forked workers inherit the setting
        self._peers: list[Peer] = []
        self._lost: list[BaseProcess] = []  # replaced, but not waited for yet
        self._remark = ""  # why the pool does not replace workers any more; a note for the errors about their deaths
        self._submitted = 0
        self._lender = Lender()
        self._pin: Callable[[Mapping], None] | None = None
        self._poll = select.poll()  # directly: `selectors` would double the time of a wait
        self._by_descriptor: dict[int, Peer] = {}
        self._unstarted: deque[tuple[Peer, list[socket.socket]]] = deque()
        try:
            # Forked workers inherit the work. For others it is pickled once, unless it can only be inherited.
            payload = None
            if context.get_start_method() == "fork":
                warn_before_fork(work.dataset)
                accelerated()  # cached here for all workers
            else:
                payload = _payload_of(work)
                # Kept for replacements: they must see the same work.
                self._payload = payload if work.repeatable else None
            for worker in range(workers):
                self._prepare(worker, payload)
        except BaseException:
            self.close()
            raise

    def pin_slots(self, pin: Callable[[Mapping], None]) -> None:
        self._pin = pin
        for peer in self._peers:
            peer.loans.pin = pin

    def limit_slots(self, limit: Callable[[], int]) -> None:
        self._lender.limit = limit

    def launch(self) -> None:
        with InterruptsHeld():
            try:
                self._start_workers()
            except BaseException as error:
                if isinstance(error, TypeError | AttributeError | PicklingError):
                    error.add_note(
                        "headrace: the dataset, collate_fn and worker_init_fn must be picklable under this start "
                        f"method, but {unpicklable_part(self.work, '', error)}; "
                        "define such things at module level, or use multiprocessing_context='fork'"
                    )
                self.breaks()
                self.close()
                raise

    def _prepare(self, worker: int, payload: Payload | None) -> None:
        (rank_end, worker_end), (rank_fds, worker_fds) = socket.socketpair(), socket.socketpair()
        _worker_ends.update((worker_end, worker_fds))
        work = self.work if payload is None else None
        arguments = (worker_end, worker_fds, work, worker, self.workers)
        peer = Peer(worker, self._new_process(target=_worker_main, args=arguments, daemon=True), rank_end, rank_fds)
        _processes.add(peer.process)
        peer.ready = payload is None
        peer.loans.pin = self._pin
        self._peers[worker : worker + 1] = [peer]  # appended, or in place of a lost one
        self._unstarted.append((peer, [worker_end, worker_fds]))
        self._poll.register(rank_end, select.POLLIN)
        self._by_descriptor[rank_end.fileno()] = peer
        if payload is not None:
            payload.send(rank_fds)

    def _start_workers(self) -> None:
        """Start workers. No more of them import and unpickle at the same time than there are CPUs."""
        if self._together:
            starting, self._unstarted = self._unstarted, deque()
            for peer, ends in starting:
                peer.started = True
                _worker_ends.difference_update(ends)
            fork_all([(cast(Process, peer.process), ends) for peer, ends in starting])
        busy = sum(peer.started and not peer.ready for peer in self._peers)
        while self._unstarted and busy < (cpu_count() or 1):
            peer, ends = self._unstarted.popleft()
            peer.started = True
            busy += not peer.ready
            _worker_ends.difference_update(ends)
            try:
                peer.process.start()
            finally:
                for end in ends:
                    end.close()

    @property
    def processes(self) -> Sequence[BaseProcess]:
        return [peer.process for peer in self._peers]

    @property
    def slots(self) -> tuple[int, int]:
        mapped = [size for peer in self._peers for size in peer.loans.sizes()]
        return len(mapped), sum(mapped)

    @property
    def owed(self) -> int:
        return sum(len(peer.unanswered) for peer in self._peers)

    def submit(self, task: Task, worker: int | None = None) -> Future:
        future = Assigned(task, self._submitted)
        self._submitted += 1
        self._assign(future, min(self._peers, key=_load) if worker is None else self._peers[worker])
        return future

    def _assign(self, future: Assigned, peer: Peer) -> None:
        future.worker = peer.worker
        peer.unanswered.append(future)
        peer.hand([future], self._lender.lend(peer, len(peer.unanswered), self._peers))
        if not peer.open:
            self._give_up(peer)

    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            for future in futures:
                if future.done():
                    return True
            left = LIVENESS_S if deadline is None else min(deadline - time.monotonic(), LIVENESS_S)
            if left <= 0:
                return False
            if not self._pump(left):
                self._check_workers()

    def poll(self) -> None:
        if self._peers:
            self._pump(0)

    def _pump(self, timeout_s: float) -> bool:
        """Send and receive until something was sent or received, or the time is over; return whether something was."""
        for peer in self._peers:
            if (peer.outbox or peer.writes) and peer.writes != bool(peer.outbox) and peer.open:
                self._poll.modify(peer.end, select.POLLIN | (0 if peer.writes else select.POLLOUT))
                peer.writes = not peer.writes
        ready = self._poll.poll(math.ceil(timeout_s * 1000))
        with InterruptsHeld():
            for descriptor, events in ready:
                peer = self._by_descriptor[descriptor]
                if events & select.POLLOUT:
                    peer.send()
                if events & ~select.POLLOUT and not peer.receive():
                    self._lose(peer)
            if self._unstarted:
                self._start_more()
        return bool(ready)

    def _check_workers(self) -> None:
        """Find workers that died or were stopped although their sockets do not show it."""
        self._check_owner()
        stopped = []
        with InterruptsHeld():
            for peer in [one for one in self._peers if one.started and one.open]:
                if peer.stopped():
                    stopped.append(described(peer))
                    peer.remark = "headrace: the worker had been stopped by SIGSTOP, and was killed for that"
                    peer.kill()
                elif peer.process.is_alive():
                    continue
                peer.receive()
                self._lose(peer)
            if self._unstarted:
                self._start_more()
        if stopped and self.work.repeatable:
            warnings.warn(
                f"{', '.join(stopped)}: somebody has sent SIGSTOP. It is killed, another takes its place, and its "
                "tasks are computed again.",
                stacklevel=7,
            )

    def _start_more(self) -> None:
        try:
            self._start_workers()
        except OSError:  # the system refuses another process
            failed = [peer for peer in self._peers if peer.started and peer.process.pid is None]
            if not (failed and self.work.repeatable):
                raise
            for peer in failed:
                self._lose(peer)

    def _lose(self, peer: Peer) -> None:
        """Give the unanswered tasks of a lost worker to others, and replace it by another process."""
        self._check_owner()
        why = peer.garbled and no_answer(described(peer), peer.garbled)
        if why:
            peer.remark = f"headrace: {why}; it was killed for that"
            peer.kill()
        false_starts = 0 if peer.up else peer.false_starts + 1
        if false_starts == MOST_FALSE_STARTS:
            peer.remark = self._remark = (
                f"headrace: {false_starts} processes in a row died as worker {peer.worker} before they could "
                "do a task: unpickling the dataset, or worker_init_fn, may end them"
            )
        if self.broken or not self.work.repeatable or false_starts == MOST_FALSE_STARTS:
            self._give_up(peer)
            return
        peer.kill()
        try:
            self._prepare(peer.worker, self._payload)
        except OSError as error:
            self._peers[peer.worker] = peer
            peer.remark = f"headrace: it could not be replaced: {error}"
            self._give_up(peer)
            return
        self._peers[peer.worker].false_starts = false_starts
        self._hang_up(peer)
        self._lost = [one for one in (*self._lost, peer.process) if one.pid is not None and one.is_alive()]
        owed, peer.unanswered = peer.unanswered, deque()
        peer.close()
        if peer.up and owed:
            owed[0].deaths += 1
        for future in sorted(owed, key=_number):
            if future.deaths < MOST_DEATHS:
                self._assign(future, min(self._peers, key=_load))
        if owed and owed[0].deaths == MOST_DEATHS:
            self._fail_deadly_task(owed[0], peer)
        self.note_restart()
        if why:
            text = f"{why}. It is killed, another takes its place, and its tasks are computed again."
            warnings.warn(text, stacklevel=8)

    def _give_up(self, peer: Peer) -> None:
        """Fail the unanswered tasks of a dead worker that is not replaced."""
        self._check_owner()
        self.breaks()
        peer.ready = True
        self._hang_up(peer)
        while peer.unanswered:
            error = death_error(peer.process)
            if peer.remark or self._remark:
                error.add_note(peer.remark or self._remark)
            peer.unanswered.popleft().fail(error)

    def _fail_deadly_task(self, future: Assigned, peer: Peer) -> None:
        error = death_error(peer.process)
        last = str(error.__cause__).partition(") ")[2]
        error.add_note(
            f"headrace: {name_task(self.work, future.task)} ended {future.deaths} workers; the last one {last}"
        )
        if peer.remark:
            error.add_note(peer.remark)
        future.fail(error)

    def _hang_up(self, peer: Peer) -> None:
        if peer.open:
            self._poll.unregister(peer.end)
            del self._by_descriptor[peer.end.fileno()]
            hang_up(peer.end)
            peer.descriptors.close()

    def describe(self, window: Sequence[Future]) -> str:
        late = next(future for future in window if not future.done())
        peer = self._peers[late.worker]
        slow = peer.unanswered[0]
        before = "" if slow is late else f", before {name_task(self.work, cast(Assigned, late).task)}"
        more = len(peer.unanswered) - 1
        return (
            f"{described(peer)} is at {name_task(self.work, slow.task)}{before}, and has {more} more to do; "
            f"{super().describe(window)}"
        )

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked child inherited the object, not the workers
            return
        with InterruptsHeld():
            self._by_descriptor.clear()
            for _, ends in self._unstarted:
                for end in ends:
                    end.close()
            self._unstarted.clear()
            self._payload = None
            peers, self._peers = self._peers, []
            lost, self._lost = self._lost, []
            later = not peers or _end_in_background(peers, lost)
        if not later:
            end_workers(peers, lost)


def _end_in_background(peers: list[Peer], lost: list[BaseProcess]) -> bool:
    """End workers in a background thread; return whether one could be started."""
    if sys.is_finalizing():  # a new thread would never run
        return False
    ended = threading.Lock()
    ended.acquire()
    _endings.add(ended)
    # In the background, since ending takes CPU time that the user's code needs now. `threading` is not used: it waits
    # until the thread runs, and takes locks that the code interrupted by a finalizer may hold.
    try:
        _thread.start_new_thread(_end, (ended, peers, lost))
    except RuntimeError:  # the system refuses another thread
        _endings.discard(ended)
        return False
    return True


def _end(ended: threading.Lock, peers: list[Peer], lost: list[BaseProcess]) -> None:
    try:
        end_workers(peers, lost)
    finally:
        peers.clear()  # so that their descriptors are closed before the lock tells that they have ended
        lost.clear()
        _endings.discard(ended)
        ended.release()


@atexit.register
def let_workers_end(limit_s: float = _LAST_MOMENT_S) -> None:
    """Wait for workers that are ending: the interpreter or multiprocessing would kill them at the exit."""
    deadline = time.monotonic() + limit_s
    for ended in list(_endings):
        if ended.acquire(timeout=max(0.0, deadline - time.monotonic())):
            ended.release()


def _load(peer: Peer) -> tuple[bool, bool, int]:
    return peer.load


def _number(future: Assigned) -> int:
    return future.number


def _payload_of(work: Work) -> Payload | None:
    """Pickle the work for all workers; return None if it holds a part that can only be inherited."""
    try:
        return Payload(work)
    except Exception:  # noqa: BLE001 - starting a process pickles it again, and raises the real error
        return None


def _worker_main(
    end: socket.socket, descriptors: socket.socket, work: Work | None, worker_id: int, workers: int
) -> None:
    """Answer tasks until the rank closes the socket or dies; the body of a worker process."""
    where = f"in DataLoader worker process {worker_id}"
    rank = os.getppid()
    # Outside of this block, a Ctrl-C would end in a traceback from multiprocessing.
    with suppress(KeyboardInterrupt, BrokenPipeError, ConnectionResetError), Interruptible():
        parent = multiprocessing.parent_process()
        if parent is not None and not end_with_rank(parent.sentinel):
            return
        if work is None:
            keep_freed_memory()
            work = receive(descriptors)
            end.sendall(EMPTY_FRAME)  # ready
        ring = Ring(descriptors)
        torch._C._set_worker_signal_handlers()
        torch.multiprocessing._set_thread_name("pt_data_worker")
        server = Server(work, worker_id, workers, ring, where)
        end.sendall(EMPTY_FRAME)  # up
        serve(end, ring, server, lambda: os.getppid() == rank)
