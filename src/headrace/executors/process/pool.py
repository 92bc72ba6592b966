"""Workers as local processes, each with a socket to the rank, and one more to pass descriptors."""

import _thread
import atexit
import multiprocessing
import os
import selectors
import socket
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
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
from headrace.executors.process.peer import Peer, death, described, dismiss
from headrace.memory.payload import Payload, receive
from headrace.memory.slots import Ring, keep_freed_memory
from headrace.memory.unpicklable import unpicklable_part
from headrace.randomness import accelerated
from headrace.system.interrupts import Interruptible, InterruptsHeld
from headrace.types import Task
from headrace.worker.work import Work

_LAST_MOMENT_S = 1.0
"""How long the end of the interpreter waits for workers, all together."""

_worker_ends: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""Those of workers that are not started yet, which other workers must not hold on to either, or nobody would see them
die. A worker's own are taken out before it is forked."""

_dismissals: set[threading.Lock] = set()
"""For each pool whose workers are being dismissed: what is released when they have ended."""

_processes: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()
"""The rank's workers: multiprocessing, at the exit of a process that was forked from the rank, would terminate them."""


def _forget_workers() -> None:
    for end in list(_worker_ends):
        end.close()
    _dismissals.clear()
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
        keep_freed_memory()  # for batches that hold bytes or text; and what is forked inherits it
        self._peers: list[Peer] = []
        self._lost: list[BaseProcess] = []  # not waited for yet
        self._remark = ""  # what to add to the error about any worker's end, since the pool has given up
        self._submitted = 0
        self._lender = Lender()
        self._selector = selectors.DefaultSelector()
        self._unstarted: deque[tuple[Peer, list[socket.socket]]] = deque()
        try:
            # Forked workers inherit the work. Others get it pickled, once for all, unless it can only be inherited.
            payload = None
            if context.get_start_method() == "fork":
                warn_before_fork(work.dataset)
                accelerated()  # which they then know
            else:
                payload = _payload_of(work)
                # Kept for those that replace others: they are to see what these saw.
                self._payload = payload if work.repeatable else None
            for worker in range(workers):
                self._prepare(worker, payload)
        except BaseException:
            self.close()
            raise

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
        self._peers[worker : worker + 1] = [peer]  # the next, or in the place of one that was lost
        self._unstarted.append((peer, [worker_end, worker_fds]))
        self._selector.register(rank_end, selectors.EVENT_READ, peer)
        if payload is not None:
            payload.send(rank_fds)

    def _start_workers(self) -> None:
        """Start workers; of those that import and unpickle, no more at a time than there are CPUs."""
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
            self._bury(peer)

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
                self._look_after_workers()

    def _pump(self, timeout_s: float) -> bool:
        """Move bytes both ways until something happened; return whether it did."""
        for peer in self._peers:
            if peer.writes != bool(peer.outbox) and peer.open:
                events = selectors.EVENT_READ | (0 if peer.writes else selectors.EVENT_WRITE)
                self._selector.modify(peer.end, events, peer)
                peer.writes = not peer.writes
        ready = self._selector.select(timeout_s)
        with InterruptsHeld():
            for chosen, events in ready:
                if events & selectors.EVENT_WRITE:
                    chosen.data.send()
                if events & selectors.EVENT_READ and not chosen.data.receive():
                    self._lose(chosen.data)
            if self._unstarted:
                self._start_more()
        return bool(ready)

    def _look_after_workers(self) -> None:
        """Find those that died, or were stopped, although their sockets do not tell."""
        self._check_owner()
        stopped = []
        with InterruptsHeld():
            for peer in [one for one in self._peers if one.started and one.open]:
                if peer.stopped():
                    stopped.append(described(peer))
                    peer.remark = "headrace: the worker had been stopped by SIGSTOP, and was killed for that"
                    peer.put_down()
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
        except OSError:  # no process is to be had
            failed = [peer for peer in self._peers if peer.started and peer.process.pid is None]
            if not (failed and self.work.repeatable):
                raise
            for peer in failed:
                self._lose(peer)

    def _lose(self, peer: Peer) -> None:
        """Have what a lost worker owes computed by others, and let another process take its place."""
        self._check_owner()
        why = peer.garbled and no_answer(described(peer), peer.garbled)
        if why:
            peer.remark = f"headrace: {why}; it was killed for that"
            peer.put_down()
        false_starts = 0 if peer.up else peer.false_starts + 1
        if false_starts == MOST_FALSE_STARTS:
            peer.remark = self._remark = (
                f"headrace: {false_starts} processes in a row died as worker {peer.worker} before they could "
                "do a task: unpickling the dataset, or worker_init_fn, may end them"
            )
        if self.broken or not self.work.repeatable or false_starts == MOST_FALSE_STARTS:
            self._bury(peer)
            return
        peer.put_down()
        try:
            self._prepare(peer.worker, self._payload)
        except OSError as error:
            self._peers[peer.worker] = peer
            peer.remark = f"headrace: nothing could take its place: {error}"
            self._bury(peer)
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
            self._blame(owed[0], peer)
        self.note_restart()
        if why:
            text = f"{why}. It is killed, another takes its place, and its tasks are computed again."
            warnings.warn(text, stacklevel=8)

    def _bury(self, peer: Peer) -> None:
        """Fail what a dead worker still owed: nobody takes its place."""
        self._check_owner()
        self.breaks()
        peer.ready = True
        self._hang_up(peer)
        while peer.unanswered:
            error = death(peer.process)
            if peer.remark or self._remark:
                error.add_note(peer.remark or self._remark)
            peer.unanswered.popleft().fail(error)

    def _blame(self, future: Assigned, peer: Peer) -> None:
        error = death(peer.process)
        last = str(error.__cause__).partition(") ")[2]
        error.add_note(
            f"headrace: {name_task(self.work, future.task)} ended {future.deaths} workers; the last one {last}"
        )
        if peer.remark:
            error.add_note(peer.remark)
        future.fail(error)

    def _hang_up(self, peer: Peer) -> None:
        if peer.open:
            self._selector.unregister(peer.end)
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
            self._selector.close()
            for _, ends in self._unstarted:
                for end in ends:
                    end.close()
            self._unstarted.clear()
            self._payload = None
            peers, self._peers = self._peers, []
            lost, self._lost = self._lost, []
            later = not peers or _dismiss_later(peers, lost)
        if not later:
            dismiss(peers, lost)


def _dismiss_later(peers: list[Peer], lost: list[BaseProcess]) -> bool:
    """Have workers told to stop, and waited for, in the background; return whether that could be begun."""
    if sys.is_finalizing():  # a thread begun now would never run
        return False
    ended = threading.Lock()
    ended.acquire()
    _dismissals.add(ended)
    # They are told when this thread has gone on: ending takes the CPUs that the user's code is about to need.
    # `threading` would wait for the new thread, and take locks that whatever a finalizer interrupted may have.
    try:
        _thread.start_new_thread(_dismiss, (ended, peers, lost))
    except RuntimeError:  # there is no thread to be had
        _dismissals.discard(ended)
        return False
    return True


def _dismiss(ended: threading.Lock, peers: list[Peer], lost: list[BaseProcess]) -> None:
    try:
        dismiss(peers, lost)
    finally:
        peers.clear()  # what they hold open is closed before anybody hears that they have ended
        lost.clear()
        _dismissals.discard(ended)
        ended.release()


@atexit.register
def let_workers_end(limit_s: float = _LAST_MOMENT_S) -> None:
    """Wait for workers that are being dismissed: at its end the interpreter, or multiprocessing, would kill them."""
    deadline = time.monotonic() + limit_s
    for ended in list(_dismissals):
        if ended.acquire(timeout=max(0.0, deadline - time.monotonic())):
            ended.release()


def _load(peer: Peer) -> tuple[bool, bool, int]:
    return peer.load


def _number(future: Assigned) -> int:
    return future.number


def _payload_of(work: Work) -> Payload | None:
    """Pickle the work for all workers; None if it holds what only a process being started may inherit."""
    try:
        return Payload(work)
    except Exception:  # noqa: BLE001 - starting the process pickles it again, and raises what is really wrong
        return None


def _worker_main(
    end: socket.socket, descriptors: socket.socket, work: Work | None, worker_id: int, workers: int
) -> None:
    """Answer tasks until the rank hangs up or dies."""
    where = f"in DataLoader worker process {worker_id}"
    rank = os.getppid()
    # An interrupt before the first or after the last line in here would end in a traceback of multiprocessing's.
    with suppress(KeyboardInterrupt, BrokenPipeError, ConnectionResetError), Interruptible():
        parent = multiprocessing.parent_process()
        if parent is not None and not end_with_rank(parent.sentinel):
            return
        if work is None:
            keep_freed_memory()
            work = receive(descriptors)
            end.sendall(EMPTY_FRAME)  # ready: the next worker may be started
        ring = Ring(descriptors)
        torch._C._set_worker_signal_handlers()
        torch.multiprocessing._set_thread_name("pt_data_worker")
        server = Server(work, worker_id, workers, ring, where)
        end.sendall(EMPTY_FRAME)  # up: whatever ends this process from now on is a task
        serve(end, ring, server, lambda: os.getppid() == rank)
