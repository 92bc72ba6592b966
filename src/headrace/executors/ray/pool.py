"""The rank's pool of Ray actors: it deals tasks to those that are up, and owns what comes back."""

import os
import selectors
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from headrace.errors import ClusterUnavailable, WorkerDied, note, throw, throw_new
from headrace.executors.base import Pool, name_task
from headrace.executors.future import Future
from headrace.executors.link.lending import Lender
from headrace.executors.link.wire import MOST_DEATHS, MOST_FALSE_STARTS, Wire, no_answer
from headrace.executors.ray.actor import Actor, Setup, by_value, pickled, versions
from headrace.executors.ray.cluster import LEFT, Head, Settings, few_came, none_came, room
from headrace.executors.ray.events import Bell, Copier, Event, Landed
from headrace.executors.ray.idle import BENCH
from headrace.executors.ray.listener import Door
from headrace.executors.ray.peer import OVERDUE_S, Asked, RayPeer, end_of, overdue_after
from headrace.memory.slots import Shelf, keep_freed_memory
from headrace.system.interrupts import InterruptsHeld
from headrace.types import Task
from headrace.worker.work import Work

_LOOK_S = 0.05
"""How often the rank looks, while it waits, whether a batch is overdue."""

_LOOK_AROUND_S = 1.0
"""How often it looks for what nobody tells, and for workers that have come up."""

_GIVEN_UP_S = 10.0
"""A worker that says nothing for so long, although others have done all it had, is replaced; Ray itself takes 14 s."""

_FEW_S = 10.0
"""After this time it is said that not all workers have come up."""


class RayPool(Pool):
    """Running actors of one rank.

    Args:
        ray: The module, connected.
        work: What they do.
        workers: How many to ask for.
        settings: Of the executor.
    """

    def __init__(self, ray: Any, work: Work, workers: int, settings: Settings) -> None:
        self.work = work
        self.workers = workers
        self._ray = ray
        self._settings = settings
        self._owner = os.getpid()
        self._kind = by_value()
        # What Ray says of a call to an actor that is no more.
        of = ray.exceptions
        self._gone = (of.RayActorError, of.OutOfMemoryError, of.NodeDiedError, of.WorkerCrashedError)
        self._lost = (of.ObjectLostError, of.GetTimeoutError)
        self._refusal: Callable[[], NoReturn] | None = None
        self._queue: deque[weakref.ref[Asked]] = deque()  # what nobody waits for any more need not be computed
        self._submitted = self._hired = self._most = 0  # most: how many tasks there have been at a time
        self._bundle = 1  # where tasks are short, so many are waited for before they are dealt
        self._worth = 1  # and so many before a worker without any is given some, while others are at work
        self._ages: deque[float] = deque(maxlen=64)
        self._started_s = self._looked_s = time.monotonic()
        self._few_told = False
        self._peers: list[RayPeer] = []
        self._wires: list[Wire] = []
        self._lender = Lender()
        self._shelf = Shelf(spare=2 * workers)
        keep_freed_memory()
        self._bell = Bell()
        self._copier = Copier(ray, self._bell, self._shelf)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell.end, selectors.EVENT_READ, self._bell)
        self._door = Door(settings.shared_memory)
        if self._door.listener is not None:
            self._selector.register(self._door.listener, selectors.EVENT_READ, self._door)
        try:
            self._payload = ray.put(pickled(work))
            self._head = Head(ray)
            for worker in range(workers):
                self._peers.append(self._hire(worker))
        except BaseException:
            self.close()
            raise

    def _hire(self, worker: int, false_starts: int = 0) -> RayPeer:
        """Ask for an actor; it is up when it says so."""
        actor, used = BENCH.new(self._ray, Actor, self._settings.options)
        self._hired += 1
        peer = RayPeer(worker, self._hired, actor, used, false_starts, self._ages)
        try:
            self._begin(peer, self._door.address)
        except BaseException:
            BENCH.end(self._head.job, actor)
            raise
        return peer

    def _begin(self, peer: RayPeer, address: str) -> None:
        """Make an actor a worker, which is to connect to an address if there is one."""
        threads = max(1, int(self._settings.num_cpus))
        setup = Setup(peer.ident, peer.worker, self.workers, threads, versions(), address)
        peer.call = peer.first_call = peer.actor.begin.remote(setup, self._payload)
        self._bell.tell_of(peer.call, (peer, "begun"))

    def _hear_bell(self) -> None:
        for event in self._bell.heard():
            peer, what = event.what[:2]
            if what == "begun":
                self._begun(peer, event)
            elif what != "served":
                self._answered(peer, event)
            elif event.error is None and not peer.up and self._counts(peer):
                self._begin(peer, "")  # the door is shut to it: another user's, or of another container
            else:
                self._lose(peer, event.error)

    def _begun(self, peer: RayPeer, event: Event) -> None:
        if not self._counts(peer):
            return
        if event.error is not None:
            if isinstance(event.error, self._gone):
                self._lose(peer, event.error)
            else:
                self._refuse(partial(throw, event.error))
            return
        peer.begun = event.outcome
        if peer.begun.versions != versions():
            there, here = (", ".join(map(" ".join, one.items())) for one in (peer.begun.versions, versions()))
            text = f"{peer} runs {there}, and the rank {here}: neither code nor bits would be the same"
            self._refuse(partial(throw_new, ClusterUnavailable, f"{text}. Install the same on all nodes."))
        elif peer.begun.failure is not None:
            self._refuse(peer.begun.failure.reraise)
        elif peer.begun.near:
            peer.call = peer.actor.serve.remote()
            self._bell.tell_of(peer.call, (peer, "served"))
            self._connect(peer)
        else:
            self._door.send_away(peer.ident)
            peer.up = True

    def _accept(self) -> None:
        self._door.accept()
        for peer in self._peers:
            self._connect(peer)

    def _connect(self, peer: RayPeer) -> None:
        """Begin to use the sockets to a worker when it is set up and both are there."""
        ends = self._door.pair(peer.ident) if peer.begun is not None and peer.wire is None else None
        if ends is not None:
            peer.wire = Wire(*ends, peer.hear)
            self._selector.register(peer.wire.end, selectors.EVENT_READ, peer)
            self._wires.append(peer.wire)
            peer.up = True

    def _lose(self, peer: RayPeer, error: BaseException | None, at_fault: bool = True) -> None:
        """Have what a lost worker owes computed by others, and let another actor take its place.

        Args:
            peer: The worker.
            error: What Ray said about its end.
            at_fault: Whether the task that it was at may have ended it.
        """
        if not self._counts(peer):
            return
        self._dismiss(peer)
        BENCH.end(self._head.job, peer.actor)
        false_starts = 0 if peer.up else peer.false_starts + (not peer.used)
        owed = [one for one in peer.unanswered if not one.done()]
        gone = peer.up and not self.work.repeatable
        if not self._head.joined():
            self._refuse(partial(throw_new, ClusterUnavailable, LEFT))
            return
        if self.broken or gone or false_starts == MOST_FALSE_STARTS:
            self._refuse(partial(throw_new, WorkerDied, end_of(peer, false_starts), error))
            return
        if peer.up and owed and at_fault and owed[0] is peer.unanswered[0]:
            owed[0].deaths += 1
        for future in sorted(owed, key=lambda one: one.number, reverse=True):
            future.holders.remove(peer)
            if future.deaths == MOST_DEATHS:
                death = WorkerDied(end_of(peer, 0))
                note(death, f"{name_task(self.work, future.task)} ended {future.deaths} workers")
                death.__cause__ = error
                future.fail(death)
            elif not future.holders:
                self._put_back(future)
        peer.lost, peer.up, peer.false_starts = True, False, false_starts
        if sum(one.lost for one in self._peers) == 1:  # others wait for the head
            self._replace_lost()

    def _replace_lost(self) -> None:
        """Let other actors take the places of lost workers; without the head Ray would wait, and end this process."""
        lost = [peer for peer in self._peers if peer.lost]
        for peer in lost if lost and self._head.answers() else ():
            self._peers[peer.worker] = self._hire(peer.worker, peer.false_starts)
            self.note_restart()

    def _counts(self, peer: RayPeer) -> bool:
        return self._peers[peer.worker] is peer and not peer.lost

    def _put_back(self, future: Asked) -> None:
        future.sent_s = 0.0
        self._queue.appendleft(weakref.ref(future))
        self._bundle = self._worth = 1  # it is late

    def _dismiss(self, peer: RayPeer) -> None:
        """Take no more from a worker."""
        wire, peer.wire = peer.wire, None
        if wire is not None:
            self._selector.unregister(wire.end)
            self._wires.remove(wire)
            wire.close()
        self._door.send_away(peer.ident)

    def _refuse(self, refusal: Callable[[], NoReturn]) -> None:
        """Give up: whatever is asked for from now on raises."""
        self.breaks()
        self._refusal = self._refusal or refusal
        for future in [*(one() for one in self._queue), *(one for peer in self._peers for one in peer.unanswered)]:
            if future is not None and not future.done():
                future.resolve_later(self._refusal)
        self._queue.clear()

    # What they have to do.

    def submit(self, task: Task, worker: int | None = None) -> Future:
        """Put a task where the next worker that has too little to do finds it."""
        self._check_owner()
        future = Asked(task, self._submitted, self._kind, self.work, worker)
        self._submitted += 1
        if self._refusal is not None:
            future.resolve_later(self._refusal)
        else:
            self._queue.append(weakref.ref(future))
            if len(self._queue) >= self._bundle:
                self._deal()
        return future

    def _deal(self) -> None:
        """Give tasks to workers that have too little to do."""
        peers = [peer for peer in self._peers if peer.up]
        self._most = max(self._most, len(self._queue) + sum(len(peer.unanswered) for peer in peers))
        share = self._most // max(1, 2 * len(peers))  # so that all have some, and the next when they are done
        worth = min(self._most // 2, max([peer.worth for peer in peers], default=1))
        self._worth = max(1, worth) if self.work.repeatable else 1
        self._bundle = max(self._worth, min(share, max([peer.bundle for peer in peers], default=1)))
        kept = []
        while self._queue:
            future = self._queue.popleft()()
            if future is None or future.done():
                continue
            peer = self._chosen(future, peers)
            if peer is not None:
                self._give(future, peer)
            else:
                kept.append(weakref.ref(future))
                if future.bound is None:
                    break
        self._queue.extendleft(reversed(kept))
        self._send(peers)

    def _chosen(self, future: Asked, peers: Sequence[RayPeer]) -> RayPeer | None:
        """Return the worker that has least to do, or that a call is being made up for; None if all have enough."""
        best: RayPeer | None = None
        for peer in peers:
            if future.bound is not None:
                if future.bound == peer.worker:
                    return peer
            elif peer.takes(future):
                if 0 < len(peer.to_send) < min(peer.bundle, self._bundle):
                    return peer
                if best is None or peer.load < best.load:
                    best = peer
        return best

    def _give(self, future: Asked, peer: RayPeer) -> None:
        now_s = time.monotonic()
        future.worker = peer.worker
        future.sent_s = future.sent_s or now_s
        if not peer.unanswered:
            peer.heard_s = now_s
        future.holders.append(peer)
        peer.unanswered.append(future)
        peer.to_send.append(future)

    def _send(self, peers: Sequence[RayPeer]) -> None:
        """Send workers what they were given: several tasks at a time where they are short and their batches small."""
        for peer in peers:
            while peer.to_send:
                some = peer.next_bundle()
                if peer.wire is None:
                    calls = peer.ask(some)
                    self._bell.tell_of(calls[0], (peer, "answered", some, calls))
                    continue
                slots = self._lender.lend(peer.wire, len(peer.unanswered), self._wires, len(some))
                peer.wire.hand(some, slots)

    def _answered(self, peer: RayPeer, event: Event) -> None:
        """Take answers that came through Ray, or the memory that they refer to."""
        _, what, futures, rest = event.what
        error, messages, memories, received_s = event.error, rest, event.outcome, event.received_s
        if error is None and what == "answered":
            try:
                answers = peer.heard(rest, event.outcome, self._copier.found)
            except Exception as lost:  # noqa: BLE001 - it is dealt with below
                error = lost
            else:
                messages, memories, received_s = answers.messages, (), answers.received_s
                if answers.slot_sizes:
                    self._copier.copy(answers, rest, (peer, "copied", futures, messages))
                    return
        if error is not None:
            self._missing(peer, futures, error)
            return
        landed = Landed(iter(memories))
        for future, message in zip(futures, messages, strict=True):
            peer.settle(future, future.done())
            future.land_from_store(message, landed, received_s / len(futures))

    def _missing(self, peer: RayPeer, futures: Sequence[Asked], error: BaseException) -> None:
        """Ask again for what was lost, with the worker or on the way; what Ray refused to carry is an error."""
        if isinstance(error, self._gone):
            self._lose(peer, error)
            return
        lost = isinstance(error, self._lost) and self.work.repeatable
        for future in reversed(futures):
            if not peer.settle(future, future.done()) or future.done():
                continue
            if not lost:
                note(error, f"Ray could not bring the batch from {peer}; {self._room('object_store_memory')}")
                future.fail(error)
            elif not future.holders:
                self._put_back(future)

    # Waiting.

    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        """Wait until one of the futures is done, and meanwhile see to it that one will be."""
        self._check_owner()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if len(self._queue) >= self._bundle or time.monotonic() - self._looked_s > _LOOK_AROUND_S:
            self._pump(0)  # also where nothing is waited for
        while not any(future.done() for future in futures):
            if self._queue and self._idle():
                with InterruptsHeld():
                    self._deal()
            if timeout_s is not None and not any(peer.up for peer in self._peers):
                deadline = time.monotonic() + timeout_s  # to start workers has a time limit of its own
            left = _LOOK_S if deadline is None else min(deadline - time.monotonic(), _LOOK_S)
            if left <= 0:
                return False
            self._pump(left)
            if self._settings.hedge and self.work.repeatable:
                self._hedge(futures)
        return True

    def _idle(self) -> bool:
        """Tell whether some worker has nothing to do, though there is what is worth a message, or nobody at work."""
        busy = [bool(peer.unanswered) for peer in self._peers if peer.up and not peer.suspect]
        return not all(busy) and (len(self._queue) >= self._worth or not any(busy))

    def _pump(self, timeout_s: float) -> None:
        """Move bytes and deal tasks until something happened."""
        for peer in self._peers:
            if peer.wire is not None and peer.writes != bool(peer.wire.outbox):
                events = selectors.EVENT_READ | (0 if peer.writes else selectors.EVENT_WRITE)
                self._selector.modify(peer.wire.end, events, peer)
                peer.writes = not peer.writes
        ready = self._selector.select(timeout_s)
        with InterruptsHeld():
            for chosen, events in ready:
                if chosen.data is self._bell:
                    self._hear_bell()
                elif chosen.data is self._door:
                    self._accept()
                else:
                    self._exchange(chosen.data, events)
            if ready and len(self._queue) >= self._bundle:
                self._deal()
            if time.monotonic() - self._looked_s > _LOOK_AROUND_S:
                self._look_around()

    def _exchange(self, peer: RayPeer, events: int) -> None:
        """Send to a worker and read from it what its socket takes and has."""
        if peer.wire is not None and events & selectors.EVENT_WRITE:
            peer.wire.send()
        if peer.wire is not None and events & selectors.EVENT_READ and not peer.wire.receive():
            why = peer.wire.garbled and no_answer(str(peer), peer.wire.garbled)
            self._lose(peer, ValueError(why) if why else None)
            if why and self.work.repeatable:
                warnings.warn(f"{why}. It is ended, and another computes its tasks again.", stacklevel=8)

    def _hedge(self, futures: Sequence[Future]) -> None:
        """Have an overdue batch, and what else its worker has, computed by others too; the first answer counts."""
        now_s = time.monotonic()
        head = min(
            (one for one in futures if isinstance(one, Asked) and one.holders and not one.done()),
            key=lambda one: one.number,
            default=None,
        )
        if head is None or not self._ages or now_s - head.sent_s < OVERDUE_S:
            return
        overdue_s = overdue_after(self._ages)
        if now_s - head.sent_s < overdue_s:
            return
        # Who helps out has tasks of its own; that it is stuck, too, shows when it says nothing for as long.
        if len(head.holders) > 1 and any(now_s - one.heard_s < overdue_s for one in head.holders):
            return
        with InterruptsHeld():
            for holder in head.holders:
                holder.suspect = True
            for future in {future: None for holder in head.holders for future in holder.unanswered}:
                others = [one for one in self._peers if one.helps(future)]
                if others and all(one.suspect for one in future.holders) and not future.done():
                    self._give(future, min(others, key=lambda one: one.load))
            self._send(self._peers)

    def _look_around(self) -> None:
        """Find out what nobody tells: workers that do not come or go on, a head that is gone."""
        now_s = time.monotonic()
        # Where the rank did something else for long, nobody could come.
        self._started_s += max(0.0, now_s - self._looked_s - 2 * _LOOK_AROUND_S)
        self._looked_s = now_s
        if not self._head.joined():
            self._refuse(partial(throw_new, ClusterUnavailable, LEFT))
            return
        up = [peer for peer in self._peers if peer.up]
        waited_s = now_s - self._started_s
        late = waited_s > self._settings.start_timeout_s and self._queue
        if late and (not up or (len(up) < self.workers and not self.work.repeatable)):
            text = none_came(len(up), self.workers, self._settings.start_timeout_s, self._room())
            self._refuse(partial(throw_new, ClusterUnavailable, text))
        elif up and len(up) < self.workers and waited_s > _FEW_S and not self._few_told:
            self._few_told = True
            warnings.warn(few_came(len(up), self.workers, self._room()), stacklevel=7)
        if up:
            self._started_s = now_s if len(up) == self.workers else self._started_s
        for peer in up:
            # As long as nobody else has finished what it is at, that may simply take long.
            if peer.suspect and all(one.done() for one in peer.unanswered) and now_s - peer.heard_s > _GIVEN_UP_S:
                self._lose(peer, None, at_fault=False)
        if self._head.lost():
            self._refuse(partial(throw_new, ClusterUnavailable, self._head.obituary))
        else:
            self._replace_lost()

    def _room(self, *more: str) -> str:
        needs = {"CPU": float(self._settings.num_cpus), **self._settings.options.get("resources", {})}
        return room(self._ray, self._head, needs | dict.fromkeys(more, 0.0))

    def describe(self, window: Sequence[Future]) -> str:
        """Say who has the batch that is waited for."""
        late = next(future for future in window if not future.done())
        up = sum(peer.up for peer in self._peers)
        who = "no worker has taken the first of them yet"
        if isinstance(late, Asked) and late.holders:
            who = "; ".join(f"{peer} has {peer.named(self.work)}" for peer in late.holders)
        return f"{who}; {up} of {self.workers} workers are up; {super().describe(window)}"

    @property
    def owed(self) -> int:
        """How many tasks are not answered."""
        return sum(one() is not None for one in self._queue) + sum(len(peer.unanswered) for peer in self._peers)

    @property
    def slots(self) -> tuple[int, int]:
        """How many pieces of memory hold batches or may, and their bytes."""
        sizes = [size for wire in self._wires for size in wire.loans.sizes()] + self._shelf.sizes()
        return len(sizes), sum(sizes)

    def close(self) -> None:
        """Let the workers go, and leave those that may serve the next pool where it finds them."""
        if os.getpid() != self._owner:  # a forked child inherited the object, not the workers
            return
        with InterruptsHeld():
            peers, self._peers = self._peers, []
            self._queue.clear()
            for peer in peers:
                self._dismiss(peer)
                peer.unanswered.clear()
                if sys.is_finalizing():
                    continue
                if self._settings.idle_s and not (peer.suspect or peer.lost or self.broken):
                    given = self._settings
                    BENCH.leave(self._head.job, given.options, peer.actor, peer.call, not peer.up, given.idle_s)
                else:
                    BENCH.end(self._head.job, peer.actor)
            self._selector.close()
            self._bell.close()
            self._copier.close()
            self._door.close()
            self._payload = None
