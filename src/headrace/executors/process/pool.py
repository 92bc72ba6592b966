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

from headrace.datasets.attributes import Attributes
from headrace.datasets.fork_safety import warn_before_fork
from headrace.errors import note
from headrace.executors.base import Executor, Pool
from headrace.executors.dispatch.pool import DispatchedPool
from headrace.executors.future import Failure
from headrace.executors.link.frames import EMPTY_FRAME
from headrace.executors.link.lending import Lender
from headrace.executors.link.serving import Server, serve
from headrace.executors.link.stacks import stacks_of_workers, write_when_asked
from headrace.executors.link.wire import Assigned, Wire, no_answer
from headrace.executors.process.forks import Process, close_rank_end, end_with_rank, fork_all, forks_together
from headrace.executors.process.peer import ProcessPeer, death_error, end_workers, exit_code, how_ended
from headrace.executors.process.room import workers_that_fit
from headrace.executors.process.starting import FROM_OUTSIDE, UNPICKLED, refuse_in_import_of_main, why_not_up
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
    resizes = True

    def start(self, work: Work, workers: int, context: Any = None) -> Pool:
        """Start the processes by the context's start method.

        Raises:
            Exception: Whatever pickle raises where a start method other than fork must pickle the dataset.
        """
        context = torch.multiprocessing if context is None else context
        if context.get_start_method() != "fork":
            refuse_in_import_of_main()
        with InterruptsHeld():
            return _ProcessPool(work, workers, context)


class _ProcessPool(DispatchedPool[ProcessPeer]):
    def __init__(self, work: Work, workers: int, context: Any) -> None:
        super().__init__(work, workers, deals_all=True)
        self._start_method: str = context.get_start_method()
        self._together = forks_together(context)
        self._new_process = partial(Process, context) if self._together else context.Process
        self._payload: Payload | None = None
        self._attributes: Attributes | None = None  # the dataset's, when the first workers began
        keep_freed_memory()  # for batches that hold bytes or text; forked workers inherit the setting
        self._ended: list[BaseProcess] = []  # replaced or left, but not waited for yet
        self._remark = ""  # why the pool does not replace workers any more
        self._false_starts: dict[int, int | None] = {}  # how the last process ended that did not come up, by worker
        self._lender = Lender()
        self._wires: list[Wire] = []
        self._pin: Callable[[Mapping], None] | None = None
        self._poll = select.poll()  # directly: `selectors` would double the time of a wait
        self._by_descriptor: dict[int, ProcessPeer] = {}
        self._unstarted: deque[tuple[ProcessPeer, list[socket.socket]]] = deque()
        try:
            # Forked workers inherit the work. For others it is pickled once, unless it can only be inherited.
            if self._start_method == "fork":
                warn_before_fork(work.dataset)
                accelerated()  # cached here for all workers
            else:
                # Kept for replacements: they must see the same work.
                self._payload = _payload_of(work)
            for worker in range(workers):
                self._peers.append(self._start(worker, 0, None))
            if not work.repeatable:
                self._payload = None
        except BaseException:
            self.close()
            raise

    def pin_slots(self, pin: Callable[[Mapping], None]) -> None:
        self._pin = pin
        for wire in self._wires:
            wire.loans.pin = pin

    def limit_slots(self, limit: Callable[[], int]) -> None:
        self._lender.limit = limit

    def launch(self) -> None:
        with InterruptsHeld():
            try:
                self._start_workers()
                if self._start_method == "fork" and self._attributes is None and self.work.repeatable:
                    self._attributes = Attributes((self.work.dataset, self.work.collate_fn))
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

    # Starting and ending workers.

    def _start(self, worker: int, false_starts: int, patience_s: float | None) -> ProcessPeer:
        """Prepare a process. It is started with all others that are prepared, and finds the tasks sent before."""
        ours, theirs = zip(socket.socketpair(), socket.socketpair(), strict=True)
        _worker_ends.update(theirs)
        payload = self._payload
        work = (self.work, self._attributes) if payload is None else None
        arguments = (*theirs, work, worker, self.workers)
        process = self._new_process(target=_worker_main, args=arguments, daemon=True)
        _processes.add(process)
        peer = ProcessPeer(worker, process, ours, false_starts, patience_s, self._dispatcher)
        peer.ready = payload is None
        peer.wire.loans.pin = self._pin
        self._wires.append(peer.wire)
        self._unstarted.append((peer, [*theirs]))
        self._poll.register(ours[0], select.POLLIN)
        self._by_descriptor[ours[0].fileno()] = peer
        if payload is not None:
            payload.send(ours[1])
        return peer

    def _start_workers(self) -> None:
        """Start workers. No more of them import and unpickle at the same time than there are CPUs."""
        if None in self._gone:  # whoever is started now has nothing to do
            return
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

    def _start_more(self) -> None:
        super()._start_more()
        try:
            self._start_workers()
        except OSError:  # the system refuses another process
            failed = [peer for peer in self._peers if peer.started and peer.process.pid is None]
            if not (failed and self.work.repeatable):
                raise
            for peer in failed:
                self._lose(peer)

    def _replace(self, peer: ProcessPeer) -> None:
        try:
            super()._replace(peer)
        except OSError as error:
            self._remark = f"it could not be replaced: {error}"
            self._give_up(partial(self._death, peer, 0, None))

    def _end(self, peer: ProcessPeer) -> None:
        if peer.unanswered:
            peer.kill()  # otherwise it ends by itself when its socket closes
        for waiting in [one for one in self._unstarted if one[0] is peer]:
            self._unstarted.remove(waiting)
            for end in waiting[1]:
                end.close()
        self._poll.unregister(peer.wire.end)
        del self._by_descriptor[peer.wire.end.fileno()]
        self._wires.remove(peer.wire)
        peer.wire.close()
        self._ended = [one for one in (*self._ended, peer.process) if one.pid is not None and one.is_alive()]

    def _never_starts(self, peer: ProcessPeer) -> bool:
        """Tell whether two processes in a row, or the first two of all, have ended alike before they were up.

        Kills from outside do not count: they hit processes by chance.
        """
        before = [*self._false_starts.values()] if not self.up else [self._false_starts.pop(peer.worker, None)]
        if peer.up:
            return False
        how = self._false_starts[peer.worker] = exit_code(peer.process)
        if how is None or how in FROM_OUTSIDE or how not in before:
            return False
        for other in self._everyone():
            if not other.up:
                other.kill()  # it would end in the same way, and say so once more
        return True

    def _death(self, peer: ProcessPeer, false_starts: int, cause: BaseException | None) -> BaseException:
        error = death_error(peer.process)
        remark = peer.why_killed and f"{peer.name} {peer.why_killed}; it was killed for that"
        if not (remark or self._remark) and false_starts:
            remark = why_not_up(peer, false_starts, self._start_method)
        if remark or self._remark:
            note(error, remark or self._remark)
        return error

    def _describe_end(self, peer: ProcessPeer, cause: BaseException | None) -> str:
        return how_ended(exit_code(peer.process))

    def _how_it_ended(self, death: BaseException) -> str:
        return "; the last one " + str(death.__cause__).partition(") ")[2]

    def room_for(self, more: int) -> int:
        """Return how many of `more` workers there is memory for."""
        return workers_that_fit(more, [peer.process.pid for peer in self._peers if peer.up], self.slots[1])

    @property
    def processes(self) -> Sequence[BaseProcess]:
        return [peer.process for peer in self._peers]

    @property
    def slots(self) -> tuple[int, int]:
        mapped = [size for wire in self._wires for size in wire.loans.sizes()]
        return len(mapped), sum(mapped)

    # Tasks and answers.

    def _new_future(self, task: Task, number: int, worker: int | None) -> Assigned:
        future = Assigned(task, number)
        future.bound = worker
        return future

    def _transmit(self, peer: ProcessPeer, futures: Sequence[Assigned]) -> None:
        wire = peer.wire
        wire.hand(futures, self._lender.lend(wire, len(peer.unanswered), self._wires, len(futures)))

    def _pump(self, timeout_s: float) -> bool:
        for peer in self._by_descriptor.values():
            if (peer.wire.outbox or peer.writes) and peer.writes != bool(peer.wire.outbox):
                self._poll.modify(peer.wire.end, select.POLLIN | (0 if peer.writes else select.POLLOUT))
                peer.writes = not peer.writes
        try:
            ready = self._poll.poll(math.ceil(timeout_s * 1000))
        except RuntimeError as error:
            raise RuntimeError(
                "two threads wait for the same workers: iterators of one loader with persistent_workers=True share "
                "them. Give each thread a loader of its own"
            ) from error
        with InterruptsHeld():
            for descriptor, events in ready:
                peer = self._by_descriptor[descriptor]
                if events & select.POLLOUT:
                    peer.wire.send()
                if events & ~select.POLLOUT and not peer.wire.receive():
                    self._hear_end(peer)
            if self._dispatcher.queue and self._dispatcher.ready:
                self._deal()
            if self._unstarted:
                self._start_more()
        return bool(ready)

    def _hear_end(self, peer: ProcessPeer) -> None:
        """Replace a worker whose socket has closed, or whose bytes are no answer."""
        if peer.wire.garbled:
            peer.why_killed = no_answer(peer.wire.garbled)
            peer.kill()
        self._lose(peer)

    def _look_after(self) -> None:
        """Find workers that died or were stopped although their sockets do not show it."""
        with InterruptsHeld():
            self._ended = [one for one in self._ended if one.is_alive()]
            for peer in [one for one in self._by_descriptor.values() if one.started]:
                if peer.stopped():
                    peer.why_killed = "has been stopped by SIGSTOP"
                    peer.kill()
                elif peer.process.is_alive():
                    continue
                peer.wire.receive()
                self._lose(peer)
            if self._unstarted:
                self._start_more()

    def _stacks(self, peers: Sequence[ProcessPeer]) -> Sequence[str]:
        return stacks_of_workers((peer, peer.process.pid) for peer in peers)

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
            self._wires.clear()
            peers = self._forget_all()
            for peer in peers:
                if peer.suspect:
                    peer.kill()  # it would not end by itself
            ended, self._ended = self._ended, []
            later = not peers or _end_in_background(peers, ended)
        if not later:
            end_workers(peers, ended)


def _end_in_background(peers: list[ProcessPeer], lost: list[BaseProcess]) -> bool:
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


def _end(ended: threading.Lock, peers: list[ProcessPeer], lost: list[BaseProcess]) -> None:
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


def _payload_of(work: Work) -> Payload | None:
    """Pickle the work for all workers; return None if it holds a part that can only be inherited."""
    try:
        return Payload(work)
    except Exception:  # noqa: BLE001 - starting a process pickles it again, and raises the real error
        return None


def _worker_main(
    end: socket.socket,
    descriptors: socket.socket,
    given: tuple[Work, Attributes | None] | None,
    worker_id: int,
    workers: int,
) -> None:
    """Answer tasks until the rank closes the socket or dies; the body of a worker process.

    Args:
        end: The socket to the rank.
        descriptors: The socket for descriptors.
        given: The work, with the attributes that its dataset should have if that may have changed; None if the rank
            sends the work.
        worker_id: The worker's number.
        workers: How many workers there are.
    """
    where = f"in DataLoader worker process {worker_id}"
    rank = os.getppid()
    # Outside of this block, a Ctrl-C would end in a traceback from multiprocessing.
    with suppress(KeyboardInterrupt, BrokenPipeError, ConnectionResetError), Interruptible():
        parent = multiprocessing.parent_process()
        if parent is not None and not end_with_rank(parent.sentinel):
            return
        work: Work | Failure
        if given is None:
            keep_freed_memory()
            try:
                work = receive(descriptors)
            except Exception as error:  # noqa: BLE001 - it is raised in the rank
                note(error, UNPICKLED)
                work = Failure.of(error, where)
            end.sendall(EMPTY_FRAME)  # ready
        else:
            work, attributes = given
            if attributes is not None:
                attributes.restore()
        ring = Ring(descriptors)
        torch._C._set_worker_signal_handlers()
        torch.multiprocessing._set_thread_name("pt_data_worker")
        write_when_asked()
        server = Server(work, worker_id, workers, ring, where)
        end.sendall(EMPTY_FRAME)  # up
        serve(end, ring, server, lambda: os.getppid() == rank)
