"""Workers as local processes, each with a socket to the rank, and one more to pass descriptors."""

import os
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing import process as processes_of_python
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from signal import Signals, strsignal
from typing import Any

import torch.multiprocessing
from torch._utils import cpu_count
from torch.utils.data import default_collate

from headrace.errors import SlotTooLarge, WorkerDied
from headrace.executors.base import Executor, Failure, Future, Pool, Remarked
from headrace.forking import warn_before_fork
from headrace.interrupts import InterruptsHeld, let_go
from headrace.memory.blame import culprit
from headrace.memory.codec import SlotWriter, lift, slot_collate
from headrace.memory.payload import Payload, receive
from headrace.memory.pickling import decode, encode
from headrace.memory.slots import Loans, Ring, keep_freed_memory
from headrace.types import StreamTask, Task
from headrace.work import Work

_COUNT = struct.Struct("<Q")

_LIVENESS_S = 1
"""How often either side looks whether the other still lives, should the closed socket not tell."""

_GRACE_S = 5.0
"""How long workers that are told to stop may take before they are terminated, all together."""

_SPARE_AFTER = 64
"""After how many tasks slots are dropped that none of them needed: they were for batches that the user held."""

_rank_ends: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""The rank's ends of all sockets: a forked process must not hold on to them, or no worker would see its rank die."""

_worker_ends: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""Those of workers that are not started yet, which other workers must not hold on to either, or nobody would see them
die. A worker's own are taken out before it is forked."""

_processes: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()
"""The rank's workers: multiprocessing, at the exit of a process that was forked from the rank, would terminate them."""


def _close_rank_ends() -> None:
    for end in [*_rank_ends, *_worker_ends]:
        end.close()
    processes_of_python._children.difference_update(_processes)  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_rank_ends)


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


class _Peer:
    """The rank's view of one worker: its process, its socket, the tasks it has not answered, oldest first."""

    def __init__(self, process: BaseProcess, end: socket.socket, descriptors: socket.socket) -> None:
        self.process = process
        self.started = self.ready = False
        self.end = end
        self.descriptors = descriptors
        self.loans = Loans(descriptors)
        self.unanswered: deque[Future] = deque()
        self.outbox: deque[memoryview] = deque()
        self._frames = _read_frames(self._answer)
        self._wanted = next(self._frames)

    def _answer(self, parts: list[bytearray]) -> None:
        if not parts:
            self.ready = True
            return
        future = self.unanswered.popleft()
        try:
            lifted = lift(parts, self.loans)
            future.size_bytes = sum(map(len, lifted))
            future.resolve_later(partial(decode, lifted))
        except SlotTooLarge as error:
            future.fail(error)

    def send(self) -> None:
        """Send as much of the outbox as the socket takes now: the rank never blocks on a busy worker."""
        while self.outbox:
            try:
                sent = self.end.send(self.outbox[0])
            except BlockingIOError:
                return
            except OSError:  # the worker is gone; reading finds that out, and what it had sent before
                self.outbox.clear()
                return
            if sent == len(self.outbox[0]):
                self.outbox.popleft()
            else:
                self.outbox[0] = self.outbox[0][sent:]

    def receive(self) -> bool:
        """Read what has arrived; return False when the worker has closed its end."""
        while True:
            try:
                count = self.end.recv_into(self._wanted)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not count:
                return False
            # An interrupt in here would tear the stream; the generator then ends, and the worker counts as lost.
            wanted = self._wanted[count:] if count < len(self._wanted) else next(self._frames, None)
            if wanted is None:
                return False
            self._wanted = wanted

    def close(self) -> None:
        """Hang up, and let go of what only a reference cycle would keep."""
        _hang_up(self.end)
        self.descriptors.close()
        self.unanswered.clear()
        self._frames.close()
        self.loans.close()


class _ProcessPool(Pool):
    def __init__(self, work: Work, workers: int, context: Any) -> None:
        self.work = work
        self.workers = workers
        self._owner = os.getpid()
        keep_freed_memory()  # for batches that hold bytes or text; and what is forked inherits it
        self._peers: list[_Peer] = []
        self._submitted = self._spare = 0  # tasks, and slots that none of the last few needed
        self._selector = selectors.DefaultSelector()
        self._unstarted: deque[tuple[_Peer, list[socket.socket]]] = deque()
        try:
            # Forked workers inherit the work. Others get it pickled, once for all, unless it can only be inherited.
            payload = None
            if context.get_start_method() == "fork":
                warn_before_fork(work.dataset)
            else:
                payload = _payload_of(work)
            for worker in range(workers):
                self._prepare(worker, context, payload)
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
                        f"method, but {culprit(self.work, '', error)}; "
                        "define such things at module level, or use multiprocessing_context='fork'"
                    )
                self.breaks()
                self.close()
                raise

    def _prepare(self, worker: int, context: Any, payload: Payload | None) -> None:
        (rank_end, worker_end), (rank_fds, worker_fds) = socket.socketpair(), socket.socketpair()
        _rank_ends.update((rank_end, rank_fds))
        _worker_ends.update((worker_end, worker_fds))
        work = self.work if payload is None else None
        arguments = (worker_end, worker_fds, work, worker, self.workers)
        peer = _Peer(context.Process(target=_worker_main, args=arguments, daemon=True), rank_end, rank_fds)
        _processes.add(peer.process)
        peer.ready = payload is None
        self._peers.append(peer)
        self._unstarted.append((peer, [worker_end, worker_fds]))
        rank_end.setblocking(False)
        self._selector.register(rank_end, selectors.EVENT_READ, peer)
        if payload is not None:
            payload.send(rank_fds)

    def _start_workers(self) -> None:
        """Start workers, no more at a time than there are CPUs for their imports and unpickling."""
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
        if worker is None:
            worker = min(range(self.workers), key=lambda one: len(self._peers[one].unanswered))
        peer = self._peers[worker]
        future = Future(worker)
        peer.unanswered.append(future)
        peer.outbox.extend(_frame(encode((task, *self._lend_slots(peer)))))
        peer.send()
        if peer.end.fileno() < 0:
            self._bury(peer)
        return future

    def _lend_slots(self, peer: _Peer) -> tuple[list[int], list[int]]:
        """Return the slots that go back to a worker with its task, and those that it is to forget.

        A slot that one worker has to make replaces one that another does not need, so that together they have no more
        than there are batches asked for, undelivered or held, and one each: a worker's turn comes when another's batch
        has just been let go, and to drop that slot each time would cost its pages. Slots that nobody needed for long
        are dropped, too.
        """
        loans, tasks = peer.loans, len(peer.unanswered)
        back, dropped = loans.lend(tasks)
        spare = sum(one.loans.spare for one in self._peers)
        self._spare = min(self._spare, spare)
        self._submitted += 1
        surplus = self._spare if self._submitted % _SPARE_AFTER == 0 else 0
        if surplus:
            self._spare = spare - surplus
        elif spare > self.workers and not back and loans.lent < tasks:
            surplus = 1
        for _ in range(surplus):
            max(self._peers, key=lambda one: one.loans.spare).loans.drop()
        return back, dropped

    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not any(future.done() for future in futures):
            left = _LIVENESS_S if deadline is None else min(deadline - time.monotonic(), _LIVENESS_S)
            if left <= 0:
                return False
            if not self._pump(left):
                for peer in self._peers:
                    if peer.started and not peer.process.is_alive():
                        peer.receive()
                        self._bury(peer)
        return True

    def _pump(self, timeout_s: float) -> bool:
        """Move bytes both ways until something happened; return whether it did."""
        for peer in self._peers:
            if peer.end.fileno() >= 0:
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
                if self._selector.get_key(peer.end).events != events:
                    self._selector.modify(peer.end, events, peer)
        ready = self._selector.select(timeout_s)
        with InterruptsHeld():
            for chosen, events in ready:
                if events & selectors.EVENT_WRITE:
                    chosen.data.send()
                if events & selectors.EVENT_READ and not chosen.data.receive():
                    self._bury(chosen.data)
            if self._unstarted:
                self._start_workers()
        return bool(ready)

    def _bury(self, peer: _Peer) -> None:
        """Fail what a dead worker still owed."""
        self.breaks()
        peer.ready = True
        if peer.end.fileno() >= 0:
            self._selector.unregister(peer.end)
            _hang_up(peer.end)
            peer.descriptors.close()
        peer.process.join(_GRACE_S)
        while peer.unanswered:
            peer.unanswered.popleft().fail(_death(peer.process))

    def close(self) -> None:
        if os.getpid() != self._owner:  # a forked child inherited the object, not the workers
            return
        with InterruptsHeld():
            self._selector.close()
            for _, ends in self._unstarted:
                for end in ends:
                    end.close()
            self._unstarted.clear()
            peers, self._peers = self._peers, []
            if sys.is_finalizing():
                _dismiss(peers)  # a thread begun now would never run
            elif peers:
                # Told to stop from there too: ending takes the CPUs that the user's code is about to need.
                threading.Thread(target=_dismiss, args=(peers,), name="headrace-reaper", daemon=True).start()


def _dismiss(peers: Sequence[_Peer]) -> None:
    """Tell workers to stop, and see that they do."""
    for peer in peers:
        peer.close()
    _reap([peer.process for peer in peers if peer.process.pid is not None])


def _hang_up(end: socket.socket) -> None:
    """Close a socket for every process that may hold a copy of it: the worker reads an end of file."""
    with suppress(OSError):  # the worker hung up first
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _reap(processes: Sequence[BaseProcess]) -> None:
    """Wait for processes that were told to stop, together; terminate, then kill, those that do not."""
    waiting = list(processes)
    for hurry in (None, "terminate", "kill"):
        for process in waiting if hurry else ():
            getattr(process, hurry or "")()
        deadline = time.monotonic() + _GRACE_S
        while waiting and (left := deadline - time.monotonic()) > 0:
            # Where SIGCHLD is ignored only the sentinel tells that a process has ended.
            ended = connection.wait([process.sentinel for process in waiting], left)
            waiting = [process for process in waiting if process.sentinel not in ended and process.is_alive()]
    for process in processes:
        # The sentinel fires a moment before there is an exit status. The process is not closed: should the interpreter
        # be about to end, multiprocessing would stumble over it.
        process.join(_LIVENESS_S)


def _death(process: BaseProcess) -> WorkerDied:
    code = process.exitcode
    if code is not None and code < 0:
        how = f"is killed by signal: {strsignal(-code) or Signals(-code).name}. "
        hint = "The kernel kills with SIGKILL when memory runs out. " if -code == Signals.SIGKILL else ""
    else:
        how = f"exited unexpectedly with exit code {code}. "
        hint = "Rerunning with num_workers=0 may show where. "
    error = WorkerDied(f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly")
    error.__cause__ = RuntimeError(f"DataLoader worker (pid {process.pid}) {how}{hint}".rstrip())
    return error


def _frame(parts: Sequence[memoryview]) -> list[memoryview]:
    """Put the number of parts and their lengths in bytes before the parts."""
    head = _COUNT.pack(len(parts)) + b"".join(_COUNT.pack(len(part)) for part in parts)
    return [memoryview(head), *(part for part in parts if len(part))]


def _read_frames(deliver: Callable[[list[bytearray]], None]) -> Generator[memoryview, None, None]:
    """Yield the memory to be filled next, for ever; call `deliver` with each frame's parts."""
    while True:
        head = bytearray(_COUNT.size)
        yield memoryview(head)
        sizes = bytearray(_COUNT.size * _COUNT.unpack(head)[0])
        if sizes:
            yield memoryview(sizes)
        parts = [bytearray(size) for (size,) in _COUNT.iter_unpack(sizes)]
        yield from (memoryview(part) for part in parts if part)
        deliver(parts)
        del parts  # the batch's memory belongs to the user now


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
    try:
        let_go()  # not sooner: an interrupt before this line would end in a traceback of multiprocessing's
        if work is None:
            keep_freed_memory()
            work = receive(descriptors)
            end.sendall(_COUNT.pack(0))  # ready: the next worker may be started
        ring = Ring(descriptors)
        writer = SlotWriter(ring)
        if work.collate_fn is default_collate:
            # Changed in place: the work is this process's own, and what runs only here costs pages of its own.
            work.collate_fn, work.allocate = slot_collate(writer, as_torch=not work.keyed), writer.empty
        torch._C._set_worker_signal_handlers()
        torch.multiprocessing._set_thread_name("pt_data_worker")
        refusal: Failure | None = None
        try:
            worker = work.start_worker(worker_id, workers)
        except Exception as error:  # noqa: BLE001 - it is raised in the rank, at the first fetch
            refusal = Failure.of(error, where)
        for task, returned, dropped in _tasks(end):
            for slot in returned:
                ring.release(slot)
            for slot in dropped:
                ring.forget(slot)
            writer.begin()
            outcome: Any = refusal
            if outcome is None:
                try:
                    outcome = worker.run(task)
                except StopIteration as error:  # from a stream's collate_fn: torch takes that for the stream's end
                    outcome = worker.end_stream() if isinstance(task, StreamTask) else Failure.of(error, where)
                except Exception as error:  # noqa: BLE001 - it is raised in the rank
                    outcome = Failure.of(error, where)
            remarks = () if refusal is not None else tuple(worker.remarks)
            try:
                parts = writer.write(Remarked(remarks, outcome) if remarks else outcome)
            except Exception as error:  # noqa: BLE001 - it is raised in the rank
                if not isinstance(error, SlotTooLarge):
                    error.add_note(f"headrace: the batch cannot be pickled: {culprit(outcome, 'batch', error)}")
                failure = Failure.of(error, where)
                parts = writer.write(Remarked(remarks, failure) if remarks else failure)
            for part in _frame(parts):
                end.sendall(part)
            del outcome, parts
    except (KeyboardInterrupt, BrokenPipeError, ConnectionResetError):
        return  # the rank was interrupted, or hung up before the batch was done


def _tasks(end: socket.socket) -> Generator[tuple[Task, list[int], list[int]], None, None]:
    """Yield tasks, each with the slots that the rank gives back along with it, and those that are to be forgotten."""
    rank = os.getppid()
    received: list[tuple[Task, list[int], list[int]]] = []
    frames = _read_frames(lambda parts: received.append(decode(parts)))
    wanted = next(frames)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", _LIVENESS_S, 0))
    while os.getppid() == rank:
        try:
            count = end.recv_into(wanted)
        except BlockingIOError:  # nothing came for so long
            continue
        if not count:
            return
        wanted = wanted[count:] if count < len(wanted) else next(frames)
        if received:
            yield received.pop()
