"""The rank's pool of Ray actors: starting, connecting, losing and replacing workers, and receiving their answers."""

import os
import platform
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headrace.errors import ClusterUnavailable, WorkerDied, note, shown
from headrace.executors.dispatch.pool import CHECK_WORKERS_S, DispatchedPool
from headrace.executors.link.stacks import stacks_of_workers
from headrace.executors.link.wire import no_answer
from headrace.executors.ray.actor import Setup, by_value_pickler, pickled, versions
from headrace.executors.ray.cluster import (
    LEFT,
    Head,
    Settings,
    describe_resources,
    few_started,
    none_started,
    starts_at_once,
    workers_that_fit,
)
from headrace.executors.ray.connections import Connections
from headrace.executors.ray.events import CopiedSlots, Copier, Event, EventQueue
from headrace.executors.ray.idle import IDLE_ACTORS
from headrace.executors.ray.peer import RayFuture, RayPeer, describe_end
from headrace.memory.slots import BufferPool, Mapping, keep_freed_memory
from headrace.system.interrupts import InterruptsHeld
from headrace.system.user_warnings import warn_user
from headrace.types import Task
from headrace.worker.work import Work

_WARN_OF_FEW_S = 10.0
"""The time after which a warning tells that not all workers have come up, in seconds."""

_PICKLING_S = 30.0
"""How long new actors wait for the pickled work, in seconds. They end if it cannot be pickled."""


class RayPool(DispatchedPool[RayPeer]):
    """The running actors of one rank.

    Args:
        ray: The module, connected.
        work: The work of each worker.
        workers: The number of workers.
        settings: The executor's settings.
    """

    def __init__(self, ray: Any, work: Work, workers: int, settings: Settings) -> None:
        super().__init__(work, workers, deals_all=False, hedges=settings.hedge)
        self._ray = ray
        self._settings = settings
        self._pickler = by_value_pickler()
        # Ray's exceptions for a call to an actor that has ended, and for a lost result.
        of = ray.exceptions
        self._death_errors = (of.RayActorError, of.OutOfMemoryError, of.NodeDiedError, of.WorkerCrashedError)
        self._loss_errors = (of.ObjectLostError, of.GetTimeoutError)
        self._started_actors = 0
        self._started_s = self._observed_s = time.monotonic()
        self._few_warned = False
        self._buffers = BufferPool(spare=2 * workers)
        keep_freed_memory()
        self._events = EventQueue()
        self._copier = Copier(ray, self._events, self._buffers)
        self._connections = Connections(self._events, settings.shared_memory, self._dispatcher.set_up)
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
            self._peers.append(self._start(len(self._peers), 0, None))

    def _start(self, worker: int, false_starts: int, patience_s: float | None) -> RayPeer:
        """Start an actor, or take an idle one, and set it up as a worker."""
        actor, used = IDLE_ACTORS.take_or_start(self._ray, self._settings.options)
        self._started_actors += 1
        peer = RayPeer(worker, self._started_actors, actor, used, self._dispatcher, false_starts, patience_s)
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
                self._give_up(partial(_same, event.error))
            return
        peer.setup_result = event.outcome
        peer.host = event.outcome.host
        if peer.setup_result.versions != versions():
            there, here = (", ".join(map(" ".join, one.items())) for one in (peer.setup_result.versions, versions()))
            text = f"{peer} runs {there}, and the rank {here}: neither code nor bits would be the same"
            self._give_up(partial(ClusterUnavailable, f"{text}. Install the same on all nodes."))
        elif peer.setup_result.failure is not None:
            self._give_up(peer.setup_result.failure.error)
        elif peer.setup_result.connected:
            peer.call = peer.actor.serve.remote()
            self._events.watch(peer.call, (peer, "served"))
            self._connections.connect(peer)
        else:
            self._connections.disconnect(peer)
            self._dispatcher.set_up(peer)

    def _lose(self, peer: RayPeer, cause: BaseException | None = None, at_fault: bool = True) -> None:
        if self._is_current(peer) and not self._head.joined():
            self._end(peer)
            self._give_up(partial(ClusterUnavailable, LEFT))
            return
        super()._lose(peer, cause, at_fault)

    def _may_replace(self, peer: RayPeer) -> bool:
        return self.work.repeatable or not peer.up

    def _replace(self, peer: RayPeer) -> None:
        if sum(one.lost for one in self._peers) == 1:  # if several are lost, the head is checked first
            self._replace_lost()

    def _replace_lost(self) -> None:
        """Start actors in place of lost workers if the head answers; otherwise Ray would wait, and end this process."""
        lost = [peer for peer in self._peers if peer.lost]
        for peer in lost if lost and self._head.answers() else ():
            super()._replace(peer)

    def _end(self, peer: RayPeer) -> None:
        """Disconnect a worker, and end its actor, unless another pool may use it."""
        self._connections.disconnect(peer)
        if peer.leaving and peer.up and not peer.unanswered:
            self._keep(peer)
        else:
            IDLE_ACTORS.end(self._head.job, peer.actor)

    def _keep(self, peer: RayPeer) -> None:
        given = self._settings
        IDLE_ACTORS.keep(self._head.job, given.options, peer.actor, peer.call, not peer.up, given.idle_s)

    def _death(self, peer: RayPeer, false_starts: int, cause: BaseException | None) -> BaseException:
        error = WorkerDied(describe_end(peer, false_starts))
        error.__cause__ = cause
        return error

    def _describe_end(self, peer: RayPeer, cause: BaseException | None) -> str:
        return (
            "exited unexpectedly" if cause is None else f"exited unexpectedly ({shown(' '.join(str(cause).split()))})"
        )

    def _give_up(self, make_error: Callable[[], BaseException], peer: RayPeer | None = None) -> None:
        super()._give_up(make_error, peer)
        for one in self._peers:  # Ray may hold the error, and its traceback this pool, for a long time
            IDLE_ACTORS.end(self._head.job, one.actor)

    def pin_slots(self, pin: Callable[[Mapping], None]) -> None:
        """Pin the slots of workers on this machine, and the buffers for batches of others."""
        self._connections.pin = self._buffers.pin = pin

    def limit_slots(self, limit: Callable[[], int]) -> None:
        """Keep no spare slots above a limit, and at most one spare buffer."""
        self._connections.limit_slots(limit)
        self._buffers.spare = 1

    # Tasks.

    def _new_future(self, task: Task, number: int, worker: int | None) -> RayFuture:
        return RayFuture(task, number, self._pickler, self.work, worker)

    def _transmit(self, peer: RayPeer, futures: Sequence[RayFuture]) -> None:
        if peer.wire is None:
            calls = peer.send_call(futures)
            self._events.watch(calls[0], (peer, "answered", futures, calls))
        else:
            self._connections.send(peer, peer.wire, futures)

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
            self._dispatcher.answered(future, peer, future.done())
            future.land_from_store(message, copied, received_s / len(futures))

    def _handle_failed_call(self, peer: RayPeer, futures: Sequence[RayFuture], error: BaseException) -> None:
        """Queue tasks again if their answers were lost with the worker or on the way; otherwise fail them."""
        if isinstance(error, self._death_errors):
            self._lose(peer, error)
            return
        lost = isinstance(error, self._loss_errors) and self.work.repeatable
        for future in reversed(futures):
            if not self._dispatcher.answered(future, peer, future.done()) or future.done():
                continue
            if not lost:
                resources = self._describe_resources("object_store_memory")
                note(error, f"Ray could not bring the batch from {peer}; {resources}")
                future.fail(error)
            elif not future.holders:
                self._dispatcher.requeue(future)

    # Waiting.

    def _pump(self, timeout_s: float) -> bool:
        ready = self._connections.wait(self._everyone(), timeout_s)
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
        return bool(ready)

    def _handle_socket(self, peer: RayPeer, flags: int) -> None:
        """Send to a worker and receive from it, as far as its socket is ready."""
        if peer.wire is not None and flags & selectors.EVENT_WRITE:
            peer.wire.send()
        if peer.wire is not None and flags & selectors.EVENT_READ and not peer.wire.receive():
            peer.why_killed = peer.wire.garbled and no_answer(peer.wire.garbled)
            self._lose(peer, ValueError(f"{peer.name} {peer.why_killed}") if peer.why_killed else None)

    def _look_after(self) -> None:
        """Check for workers that do not come up, and for a lost head: neither causes events."""
        with InterruptsHeld():
            self._check_cluster()

    def _check_cluster(self) -> None:
        now_s = time.monotonic()
        # No worker could connect while the rank did something else: that time does not count.
        self._started_s += max(0.0, now_s - self._observed_s - 2 * CHECK_WORKERS_S)
        self._observed_s = now_s
        if not self._head.joined():
            self._give_up(partial(ClusterUnavailable, LEFT))
            return
        up = [peer for peer in self._peers if peer.up]
        waited_s = now_s - self._started_s
        late = waited_s > self._settings.start_timeout_s and self._dispatcher.queue
        if late and (not up or (len(up) < self.workers and not self.work.repeatable)):
            text = none_started(len(up), self.workers, self._settings.start_timeout_s, self._describe_resources())
            self._give_up(partial(ClusterUnavailable, text))
        elif up and len(up) < self.workers and waited_s > _WARN_OF_FEW_S and not self._few_warned:
            self._few_warned = True
            warn_user(few_started(len(up), self.workers, self._describe_resources()))
        if up:
            self._started_s = now_s if len(up) == self.workers else self._started_s
        if waited_s > _WARN_OF_FEW_S:
            self._at_once = self.workers  # some may never come up, as on a node that hangs
        if self._head.lost():
            self._give_up(partial(ClusterUnavailable, self._head.loss_message))
        else:
            self._replace_lost()
            self._start_more()

    def _stacks(self, peers: Sequence[RayPeer]) -> Sequence[str]:
        """Return what workers on this machine are doing; those on others do not tell."""
        here = platform.node()
        return stacks_of_workers((one, one.setup_result.pid) for one in peers if one.setup_result and one.host == here)

    @property
    def _needs(self) -> dict[str, float]:
        """What each worker reserves of the cluster's resources."""
        return {"CPU": float(self._settings.num_cpus), **self._settings.options.get("resources", {})}

    def _describe_resources(self, *more: str) -> str:
        return describe_resources(self._ray, self._head, self._needs | dict.fromkeys(more, 0.0))

    def room_for(self, more: int) -> int:
        """Return how many of `more` workers the cluster has free resources for, or idle actors."""
        free = workers_that_fit(self._ray, self._head, self._needs)
        if free is None:
            return more
        starting = self.workers - self.up  # they may not have theirs yet
        idle = IDLE_ACTORS.count(self._head.job, self._settings.options)
        return max(0, min(more, free + idle - starting))

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
            for peer in self._forget_all():
                self._connections.disconnect(peer)
                peer.drop_tasks()
                if sys.is_finalizing():
                    continue
                if self._settings.idle_s and not (peer.suspect or peer.lost or self.broken):
                    self._keep(peer)
                else:
                    IDLE_ACTORS.end(self._head.job, peer.actor)
            self._connections.close()
            self._events.close()
            self._copier.close()
            self._payload = None


def _same(error: BaseException) -> BaseException:
    return error
