"""The rank's pool of Ray actors: starting, connecting, losing and replacing workers, and receiving their answers."""

import os
import selectors
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from headrace.errors import ClusterUnavailable, WorkerDied, note, throw, throw_new
from headrace.executors.base import Pool, name_task
from headrace.executors.future import Future
from headrace.executors.link.wire import MOST_DEATHS, MOST_FALSE_STARTS, no_answer
from headrace.executors.ray.actor import Setup, by_value_pickler, pickled, versions
from headrace.executors.ray.cluster import (
    LEFT,
    Head,
    Settings,
    describe_resources,
    few_started,
    none_started,
    starts_at_once,
)
from headrace.executors.ray.connections import Connections
from headrace.executors.ray.dispatch import Dispatcher, hedge
from headrace.executors.ray.events import CopiedSlots, Copier, Event, EventQueue
from headrace.executors.ray.idle import IDLE_ACTORS
from headrace.executors.ray.peer import RayFuture, RayPeer, describe_end
from headrace.memory.slots import BufferPool, Mapping, keep_freed_memory
from headrace.system.interrupts import InterruptsHeld
from headrace.types import Task
from headrace.worker.work import Work

_CHECK_OVERDUE_S = 0.05
"""The time between two checks of a waiting rank for overdue batches, in seconds."""

_CHECK_WORKERS_S = 1.0
"""The time between two checks of a waiting rank of its workers and the cluster's head, in seconds."""

_GIVEN_UP_S = 10.0
"""A suspect worker is replaced after this time without an answer, in seconds, if others have finished its tasks."""

_WARN_OF_FEW_S = 10.0
"""The time after which a warning tells that not all workers have come up, in seconds."""

_PICKLING_S = 30.0
"""How long new actors wait for the pickled work, in seconds. They end if it cannot be pickled."""


class RayPool(Pool):
    """The running actors of one rank.

    Args:
        ray: The module, connected.
        work: The work of each worker.
        workers: The number of workers.
        settings: The executor's settings.
    """

    def __init__(self, ray: Any, work: Work, workers: int, settings: Settings) -> None:
        self.work = work
        self.workers = workers
        self._ray = ray
        self._settings = settings
        self._owner = os.getpid()
        self._pickler = by_value_pickler()
        # Ray's exceptions for a call to an actor that has ended, and for a lost result.
        of = ray.exceptions
        self._death_errors = (of.RayActorError, of.OutOfMemoryError, of.NodeDiedError, of.WorkerCrashedError)
        self._loss_errors = (of.ObjectLostError, of.GetTimeoutError)
        self._raise_final: Callable[[], NoReturn] | None = None
        self._dispatcher = Dispatcher(work.repeatable)
        self._submitted = self._started_actors = 0
        self._started_s = self._checked_s = time.monotonic()
        self._few_warned = False
        self._peers: list[RayPeer] = []
        self._buffers = BufferPool(spare=2 * workers)
        keep_freed_memory()
        self._events = EventQueue()
        self._copier = Copier(ray, self._events, self._buffers)
        self._connections = Connections(self._events, settings.shared_memory)
        try:
            self._head = Head(ray)
            self._at_once = starts_at_once(ray)
            IDLE_ACTORS.start(ray, settings.options, min(workers, self._at_once), max(settings.idle_s, _PICKLING_S))
            self._payload = ray.put(pickled(work))  # the actors start meanwhile
            self._start_more()
        except BaseException:
            self.close()
            raise

    def _start_more(self) -> None:
        """Start workers, as long as no more new actors are starting than there are CPUs for."""
        while len(self._peers) < self.workers and not self.broken:
            if sum(not (peer.up or peer.used) for peer in self._peers) >= self._at_once:
                break
            self._peers.append(self._start_actor(len(self._peers)))

    def _start_actor(self, worker: int, false_starts: int = 0) -> RayPeer:
        """Start an actor, or take an idle one, and set it up as a worker."""
        actor, used = IDLE_ACTORS.take_or_start(self._ray, self._settings.options)
        self._started_actors += 1
        peer = RayPeer(worker, self._started_actors, actor, used, false_starts, self._dispatcher.ages)
        try:
            self._set_up(peer, self._connections.address)
        except BaseException:
            IDLE_ACTORS.end(self._head.job, actor)
            raise
        return peer

    def _set_up(self, peer: RayPeer, address: str) -> None:
        """Ask an actor to become a worker; it connects to the address unless that is empty."""
        threads = max(1, int(self._settings.num_cpus))
        setup = Setup(peer.ident, peer.worker, self.workers, threads, versions(), address)
        peer.call = peer.first_call = peer.actor.set_up.remote(setup, self._payload)
        self._events.watch(peer.call, (peer, "set up"))

    def _handle_events(self) -> None:
        for event in self._events.drain():
            peer, what = event.label[:2]
            if what == "set up":
                self._handle_setup(peer, event)
            elif what != "served":
                self._handle_answers(peer, event)
            elif event.error is None and not peer.up and self._is_current(peer):
                self._set_up(peer, "")  # it was not let in: it has another user or container
            else:
                self._lose(peer, event.error)

    def _handle_setup(self, peer: RayPeer, event: Event) -> None:
        if not self._is_current(peer):
            return
        if event.error is not None:
            if isinstance(event.error, self._death_errors):
                self._lose(peer, event.error)
            else:
                self._give_up(partial(throw, event.error))
            return
        peer.setup_result = event.outcome
        if peer.setup_result.versions != versions():
            there, here = (", ".join(map(" ".join, one.items())) for one in (peer.setup_result.versions, versions()))
            text = f"{peer} runs {there}, and the rank {here}: neither code nor bits would be the same"
            self._give_up(partial(throw_new, ClusterUnavailable, f"{text}. Install the same on all nodes."))
        elif peer.setup_result.failure is not None:
            self._give_up(peer.setup_result.failure.reraise)
        elif peer.setup_result.connected:
            peer.call = peer.actor.serve.remote()
            self._events.watch(peer.call, (peer, "served"))
            self._connections.connect(peer)
        else:
            self._connections.disconnect(peer)
            peer.up = True

    def _lose(self, peer: RayPeer, error: BaseException | None, at_fault: bool = True) -> None:
        """Queue the tasks of a lost worker again, and start another actor in its place.

        Args:
            peer: The worker.
            error: Ray's exception about its end.
            at_fault: Whether its present task may have ended it.
        """
        if not self._is_current(peer):
            return
        self._connections.disconnect(peer)
        IDLE_ACTORS.end(self._head.job, peer.actor)
        false_starts = 0 if peer.up else peer.false_starts + (not peer.used)
        owed = [one for one in peer.unanswered if not one.done()]
        gone = peer.up and not self.work.repeatable
        if not self._head.joined():
            self._give_up(partial(throw_new, ClusterUnavailable, LEFT))
            return
        if self.broken or gone or false_starts == MOST_FALSE_STARTS:
            self._give_up(partial(throw_new, WorkerDied, describe_end(peer, false_starts), error))
            return
        if peer.up and owed and at_fault and owed[0] is peer.unanswered[0]:
            owed[0].deaths += 1
        for future in sorted(owed, key=lambda one: one.number, reverse=True):
            future.holders.remove(peer)
            if future.deaths == MOST_DEATHS:
                death = WorkerDied(describe_end(peer, 0))
                note(death, f"{name_task(self.work, future.task)} ended {future.deaths} workers")
                death.__cause__ = error
                future.fail(death)
            elif not future.holders:
                self._dispatcher.requeue(future)
        peer.lost, peer.up, peer.false_starts = True, False, false_starts
        if sum(one.lost for one in self._peers) == 1:  # if several are lost, the head is checked first
            self._replace_lost()

    def _replace_lost(self) -> None:
        """Start actors in place of lost workers if the head answers; otherwise Ray would wait, and end this process."""
        lost = [peer for peer in self._peers if peer.lost]
        for peer in lost if lost and self._head.answers() else ():
            self._peers[peer.worker] = self._start_actor(peer.worker, peer.false_starts)
            self.note_restart()

    def _is_current(self, peer: RayPeer) -> bool:
        return self._peers[peer.worker] is peer and not peer.lost

    def _give_up(self, raise_final: Callable[[], NoReturn]) -> None:
        """Stop all work: all tasks, also later ones, call `raise_final`, which raises the error."""
        self.breaks()
        self._raise_final = self._raise_final or raise_final
        for future in [*self._dispatcher.queued(), *(one for peer in self._peers for one in peer.unanswered)]:
            if not future.done():
                future.resolve_later(self._raise_final)
        self._dispatcher.queue.clear()
        for peer in self._peers:  # Ray may hold the error, and its traceback this pool, for a long time
            IDLE_ACTORS.end(self._head.job, peer.actor)

    def pin_slots(self, pin: Callable[[Mapping], None]) -> None:
        """Pin the slots of workers on this machine, and the buffers for batches of others."""
        self._connections.pin = self._buffers.pin = pin

    def limit_slots(self, limit: Callable[[], int]) -> None:
        """Keep no spare slots above a limit, and at most one spare buffer."""
        self._connections.limit_slots(limit)
        self._buffers.spare = 1

    # Tasks.

    def submit(self, task: Task, worker: int | None = None) -> Future:
        """Queue a task for the next worker with credit."""
        self._check_owner()
        future = RayFuture(task, self._submitted, self._pickler, self.work, worker)
        self._submitted += 1
        if self._raise_final is not None:
            future.resolve_later(self._raise_final)
        else:
            self._dispatcher.add(future)
            if self._dispatcher.ready:
                self._deal()
        return future

    def _deal(self) -> None:
        """Assign queued tasks to workers with credit, and send them."""
        peers = [peer for peer in self._peers if peer.up]
        self._dispatcher.deal(peers)
        self._send(peers)

    def _send(self, peers: Sequence[RayPeer]) -> None:
        """Send workers their unsent tasks: several in a message where they are short and their batches small."""
        for peer in peers:
            while peer.unsent:
                some = peer.next_bundle()
                if peer.wire is None:
                    calls = peer.send_call(some)
                    self._events.watch(calls[0], (peer, "answered", some, calls))
                    continue
                self._connections.send(peer, peer.wire, some)

    def _handle_answers(self, peer: RayPeer, event: Event) -> None:
        """Receive answers through Ray, or the copied memory of their slots."""
        _, what, futures, rest = event.label
        error, messages, memories, received_s = event.error, rest, event.outcome, event.received_s
        if error is None and what == "answered":
            try:
                answers = peer.receive_results(rest, event.outcome, self._copier.get_arrived)
            except Exception as lost:  # noqa: BLE001 - it is handled below
                error = lost
            else:
                messages, memories, received_s = answers.messages, (), answers.received_s
                if answers.slot_sizes:
                    self._copier.copy(answers, rest, (peer, "copied", futures, messages))
                    return
        if error is not None:
            self._handle_failed_call(peer, futures, error)
            return
        copied = CopiedSlots(iter(memories))
        for future, message in zip(futures, messages, strict=True):
            peer.complete(future, future.done())
            future.land_from_store(message, copied, received_s / len(futures))

    def _handle_failed_call(self, peer: RayPeer, futures: Sequence[RayFuture], error: BaseException) -> None:
        """Queue tasks again if their answers were lost with the worker or on the way; otherwise fail them."""
        if isinstance(error, self._death_errors):
            self._lose(peer, error)
            return
        lost = isinstance(error, self._loss_errors) and self.work.repeatable
        for future in reversed(futures):
            if not peer.complete(future, future.done()) or future.done():
                continue
            if not lost:
                resources = self._describe_resources("object_store_memory")
                note(error, f"Ray could not bring the batch from {peer}; {resources}")
                future.fail(error)
            elif not future.holders:
                self._dispatcher.requeue(future)

    # Waiting.

    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        """Wait until one of the futures is done; meanwhile, deal tasks and check the workers."""
        self._check_owner()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._dispatcher.ready or time.monotonic() - self._checked_s > _CHECK_WORKERS_S:
            self._pump(0)  # also if a future is done already
        while not any(future.done() for future in futures):
            if self._dispatcher.queue and self._dispatcher.has_idle_worker(self._peers):
                with InterruptsHeld():
                    self._deal()
            if timeout_s is not None and not any(peer.up for peer in self._peers):
                deadline = time.monotonic() + timeout_s  # starting workers has its own time limit
            left = _CHECK_OVERDUE_S if deadline is None else min(deadline - time.monotonic(), _CHECK_OVERDUE_S)
            if left <= 0:
                return False
            self._pump(left)
            if self._settings.hedge and self.work.repeatable:
                overdue = self._dispatcher.overdue(futures)
                if overdue is not None:
                    with InterruptsHeld():
                        hedge(overdue, self._peers)
                        self._send(self._peers)
        return True

    def poll(self) -> None:
        """Receive what has come from the workers, without waiting."""
        if self._peers:
            self._pump(0)

    def _pump(self, timeout_s: float) -> None:
        """Wait for events, handle them, and deal tasks."""
        ready = self._connections.wait(self._peers, timeout_s)
        with InterruptsHeld():
            for source, flags in ready:
                if isinstance(source, RayPeer):
                    self._handle_socket(source, flags)
                elif source is self._events:
                    self._handle_events()
                else:
                    source.accept()
                    for peer in self._peers:
                        self._connections.connect(peer)
            if ready and self._dispatcher.ready:
                self._deal()
            if ready and len(self._peers) < self.workers:
                self._start_more()
            if time.monotonic() - self._checked_s > _CHECK_WORKERS_S:
                self._check_workers()

    def _handle_socket(self, peer: RayPeer, flags: int) -> None:
        """Send to a worker and receive from it, as far as its socket is ready."""
        if peer.wire is not None and flags & selectors.EVENT_WRITE:
            peer.wire.send()
        if peer.wire is not None and flags & selectors.EVENT_READ and not peer.wire.receive():
            why = peer.wire.garbled and no_answer(str(peer), peer.wire.garbled)
            self._lose(peer, ValueError(why) if why else None)
            if why and self.work.repeatable:
                warnings.warn(f"{why}. It is replaced, and its tasks are computed again.", stacklevel=8)

    def _check_workers(self) -> None:
        """Check for workers that do not come up or do not answer, and for a lost head: none of them causes events."""
        now_s = time.monotonic()
        # No worker could connect while the rank did something else: that time does not count.
        self._started_s += max(0.0, now_s - self._checked_s - 2 * _CHECK_WORKERS_S)
        self._checked_s = now_s
        if not self._head.joined():
            self._give_up(partial(throw_new, ClusterUnavailable, LEFT))
            return
        up = [peer for peer in self._peers if peer.up]
        waited_s = now_s - self._started_s
        late = waited_s > self._settings.start_timeout_s and self._dispatcher.queue
        if late and (not up or (len(up) < self.workers and not self.work.repeatable)):
            text = none_started(len(up), self.workers, self._settings.start_timeout_s, self._describe_resources())
            self._give_up(partial(throw_new, ClusterUnavailable, text))
        elif up and len(up) < self.workers and waited_s > _WARN_OF_FEW_S and not self._few_warned:
            self._few_warned = True
            warnings.warn(few_started(len(up), self.workers, self._describe_resources()), stacklevel=7)
        if up:
            self._started_s = now_s if len(up) == self.workers else self._started_s
        for peer in up:
            # A task that no other worker has finished may just take long.
            if peer.suspect and all(one.done() for one in peer.unanswered) and now_s - peer.last_answer_s > _GIVEN_UP_S:
                self._lose(peer, None, at_fault=False)
        if waited_s > _WARN_OF_FEW_S:
            self._at_once = self.workers  # some may never come up, as on a node that hangs
        if self._head.lost():
            self._give_up(partial(throw_new, ClusterUnavailable, self._head.loss_message))
        else:
            self._replace_lost()
            self._start_more()

    def _describe_resources(self, *more: str) -> str:
        needs = {"CPU": float(self._settings.num_cpus), **self._settings.options.get("resources", {})}
        return describe_resources(self._ray, self._head, needs | dict.fromkeys(more, 0.0))

    def describe(self, window: Sequence[Future]) -> str:
        """Name the workers of the batch that the reader waits for."""
        late = next(future for future in window if not future.done())
        up = sum(peer.up for peer in self._peers)
        who = "no worker has taken the first of them yet"
        if isinstance(late, RayFuture) and late.holders:
            who = "; ".join(f"{peer} has {peer.name_tasks(self.work)}" for peer in late.holders)
        return f"{who}; {up} of {self.workers} workers are up; {super().describe(window)}"

    @property
    def owed(self) -> int:
        """The number of tasks without an answer."""
        return len(self._dispatcher.queued()) + sum(len(peer.unanswered) for peer in self._peers)

    @property
    def slots(self) -> tuple[int, int]:
        """The number of slots and buffers that are mapped, and their bytes."""
        sizes = self._connections.slot_sizes() + self._buffers.sizes()
        return len(sizes), sum(sizes)

    def close(self) -> None:
        """End the workers, but keep usable actors for the next pool."""
        if os.getpid() != self._owner:  # a forked child inherited the object, not the workers
            return
        with InterruptsHeld():
            peers, self._peers = self._peers, []
            self._dispatcher.queue.clear()
            for peer in peers:
                self._connections.disconnect(peer)
                peer.unanswered.clear()
                if sys.is_finalizing():
                    continue
                if self._settings.idle_s and not (peer.suspect or peer.lost or self.broken):
                    given = self._settings
                    IDLE_ACTORS.keep(self._head.job, given.options, peer.actor, peer.call, not peer.up, given.idle_s)
                else:
                    IDLE_ACTORS.end(self._head.job, peer.actor)
            self._connections.close()
            self._events.close()
            self._copier.close()
            self._payload = None
