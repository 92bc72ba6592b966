"""A pool whose tasks a dispatcher deals. What carries tasks and answers is left to its subclasses."""

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from headrace.errors import DeliveryTimeout, note
from headrace.executors.base import Pool, name_task
from headrace.executors.dispatch import rules
from headrace.executors.dispatch.dispatcher import Dispatcher
from headrace.executors.dispatch.peer import Dispatched, Peer
from headrace.executors.future import Future
from headrace.system.interrupts import InterruptsHeld
from headrace.types import Task
from headrace.worker.work import Work

_CHECK_OVERDUE_S = 0.05
"""The time between two checks of a waiting rank for overdue batches, in seconds."""

_MOST_SPARES = 3
"""How many more workers may leave than the pool has, before no others are started beside those that hang."""

CHECK_WORKERS_S = 1.0
"""The time between two checks of a waiting rank of its workers, in seconds."""


P = TypeVar("P", bound=Peer[Any])


class DispatchedPool(Pool, Generic[P]):
    """Workers that a `Dispatcher` deals tasks to: one for each number from 0 on, and those that leave.

    Args:
        work: The work of each worker.
        workers: The number of workers.
        deals_all: Whether workers get all tasks at once, in equal shares.
        hedges: Whether a second worker computes a batch that is overdue.
        clock: Returns the time, in seconds.
    """

    def __init__(
        self,
        work: Work,
        workers: int,
        deals_all: bool,
        hedges: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.work = work
        self.workers = workers
        self._owner = os.getpid()
        self._clock = clock
        self._hedges = hedges and work.repeatable
        self._dispatcher = Dispatcher(work.repeatable, deals_all, clock)
        self._submitted = 0
        self._checked_s = self._looked_s = clock()
        self._peers: list[P] = []
        self._leaving: list[P] = []
        # What makes errors for the tasks of each worker that is not replaced; under None, for all tasks.
        self._gone: dict[int | None, Callable[[], BaseException]] = {}

    # What carries tasks and answers.

    @abstractmethod
    def _new_future(self, task: Task, number: int, worker: int | None) -> Dispatched:
        """Return the future of a task.

        Raises:
            Exception: The task cannot be sent.
        """

    @abstractmethod
    def _transmit(self, peer: P, futures: Sequence[Any]) -> None:
        """Send tasks to a worker in one message."""

    @abstractmethod
    def _pump(self, timeout_s: float) -> bool:
        """Send and receive until something was sent or received, or the time is over; return whether something was."""

    @abstractmethod
    def _start(self, worker: int, false_starts: int, patience_s: float | None) -> P:
        """Start a worker. It takes the place of the one with this number, or is added."""

    @abstractmethod
    def _end(self, peer: P) -> None:
        """End a worker that was lost, hangs or leaves, and close what connects it."""

    @abstractmethod
    def _death(self, peer: P, false_starts: int, cause: BaseException | None) -> BaseException:
        """Return the error about the end of a worker.

        Args:
            peer: The worker.
            false_starts: How many workers with its number have died before they were up, if that is why.
            cause: What told of its end, or None.
        """

    def _how_it_ended(self, death: BaseException) -> str:
        """Return the end of a sentence about the last worker that a task ended, from the error about its death."""
        return ""

    def _may_replace(self, peer: P) -> bool:
        """Tell whether another worker may take the place of a lost one."""
        return self.work.repeatable

    def _never_starts(self, peer: P) -> bool:
        """Tell, of a worker that has just been lost, whether others would end before they are up, as it has."""
        return False

    def _describe_end(self, peer: P, cause: BaseException | None) -> str:
        """Return how a lost worker ended, as the end of a sentence that begins with its name."""
        return "has ended"

    def _look_after(self) -> None:
        """Check, about once a second of waiting, what the links do not show by themselves."""

    def _stacks(self, peers: Sequence[Any]) -> Sequence[str]:
        """Return what workers are doing, each as a text with their stacks, where they tell."""
        return ()

    # Tasks.

    def submit(self, task: Task, worker: int | None = None) -> Future:
        """Queue a task for the next worker with credit, or for the given one."""
        self._check_owner()
        future = self._new_future(task, self._submitted, worker)
        self._submitted += 1
        if self._gone and (make := self._error_for(worker)) is not None:
            future.fail(make())
            return future
        dispatcher = self._dispatcher
        peer: Any = None if dispatcher.queue else dispatcher.direct(future, self._peers)
        if peer is not None:
            self._transmit(peer, (future,))
            return future
        dispatcher.add(future)
        if dispatcher.ready:
            self._deal()
        return future

    def _error_for(self, worker: int | None) -> Callable[[], BaseException] | None:
        """Return what makes the error in place of a task's batch: its worker is gone, or one is and any would do."""
        every = self._gone.get(None)
        if every is None:
            return next(iter(self._gone.values())) if worker is None else self._gone.get(worker)
        return every

    def _deal(self) -> None:
        """Assign queued tasks to workers with credit, and send them."""
        peers = [peer for peer in self._peers if peer.takes]
        if self.work.repeatable:
            peers = [peer for peer in peers if peer.up] or peers  # a worker that starts may take long to do so
        self._dispatcher.deal(peers, self.workers)
        self._send(peers)

    def _send(self, peers: Sequence[P]) -> None:
        """Send workers their unsent tasks: several in a message where they are short and their batches small."""
        for peer in peers:
            while peer.unsent:
                self._transmit(peer, peer.next_bundle())

    # Waiting.

    def wait(self, futures: Sequence[Future], timeout_s: float | None = None) -> bool:
        """Wait until one of the futures is done; meanwhile, deal tasks and look after the workers.

        A task hangs when it has taken two workers `timeout_s` each.
        """
        now_s = self._clock()
        deadline = None if timeout_s is None else now_s + timeout_s
        if (self._dispatcher.queue and self._dispatcher.ready) or now_s - self._checked_s > CHECK_WORKERS_S:
            self._check_owner()
            self._pump(0)  # also if a future is done already
            self._look(futures, timeout_s)
        self._check_owner()
        while True:
            for future in futures:
                if future.done():
                    return True
            if self._dispatcher.queue and self._dispatcher.has_idle_worker(self._peers):
                with InterruptsHeld():
                    self._deal()
            left = _CHECK_OVERDUE_S if self.work.repeatable else CHECK_WORKERS_S
            if timeout_s is not None and deadline is not None:
                if not any(peer.takes for peer in self._peers):
                    deadline = self._clock() + timeout_s  # starting workers has its own time limit
                left = min(left, deadline - self._clock())
                if left <= 0:
                    return False
            if not self._pump(left):
                self._dispatcher.hurry()  # a few tasks may wait for more, or for workers that hang
            if self._leaving or self._clock() - self._looked_s > _CHECK_OVERDUE_S / 2:
                self._look(futures, timeout_s)

    def poll(self) -> None:
        """Receive what has come from the workers, without waiting."""
        if self._peers:
            self._pump(0)

    def _look(self, futures: Sequence[Future], timeout_s: float | None) -> None:
        """Look for batches that are overdue, and from time to time for workers that do not answer."""
        now_s = self._looked_s = self._clock()
        if self._leaving:
            self._dismiss()
        if self._hedges:
            overdue = self._dispatcher.overdue(futures, self._peers)
            if overdue is not None:
                with InterruptsHeld():
                    self._dispatcher.hedge(overdue, self._peers, self._everyone())
                    self._send(self._peers)
                    beside: Any = self._dispatcher.needs_spare(self._peers, self._everyone())
                    if beside is not None and len(self._leaving) < self.workers + _MOST_SPARES:
                        self._set_aside(beside)
        if now_s - self._checked_s > CHECK_WORKERS_S:
            self._checked_s = now_s
            self._check_owner()
            self._look_after()
            if self._hedges:
                with InterruptsHeld():
                    self._replace_silent()
                    hung = self._dispatcher.hung(self._everyone(), timeout_s)
                    if hung is not None:
                        self._give_up_on(hung)

    def _set_aside(self, peer: P) -> None:
        """Start a worker in the place of one that may hang. That one leaves when it has answered."""
        self._leave(peer)
        self._peers[peer.worker] = self._start(peer.worker, 0, peer.patience_s)
        self.note_restart()

    def _leave(self, peer: P) -> None:
        self._dispatcher.leave(peer)
        self._leaving.append(peer)

    def _everyone(self) -> list[P]:
        return [*self._peers, *self._leaving]

    def _replace_silent(self) -> None:
        now_s = self._clock()
        for peer in self._everyone():
            if peer.silent(now_s):
                self._lose(peer, at_fault=False)

    def _give_up_on(self, future: Dispatched) -> None:
        """Fail a task that hangs, and replace the workers that are at it."""
        holders: list[Any] = [one for one in future.holders if one.unanswered[0] is future]
        waited_s = min(one.time_at(future, self._clock()) for one in holders)
        error = DeliveryTimeout(f"{name_task(self.work, future.task)} hangs")
        who = " and ".join(map(str, holders))
        others = "another" if len(holders) == 1 else "others"
        note(error, f"no answer for {waited_s:.0f} s, from {who}; replaced by {others}")
        for text in self._stacks(holders):
            note(error, text)
        future.fail(error)
        for peer in holders:
            self._lose(peer, at_fault=False)

    # Workers.

    def _is_current(self, peer: P) -> bool:
        return not peer.lost and peer in self._everyone()

    def _lose(self, peer: P, cause: BaseException | None = None, at_fault: bool = True) -> None:
        """Queue the tasks of a lost worker again, and start another in its place.

        Args:
            peer: The worker.
            cause: What told of its end, or None.
            at_fault: Whether its present task may have ended it.
        """
        if not self._is_current(peer):
            return
        was_up, false_starts = peer.up, 0 if peer.up else peer.false_starts + (not peer.used)
        hopeless = self._never_starts(peer) or false_starts == rules.MOST_FALSE_STARTS
        silent_s = self._clock() - peer.last_answer_s
        self._end(peer)
        if self.broken or hopeless or not self._may_replace(peer):
            alone = not (self.work.repeatable or hopeless)
            self._give_up(partial(self._death, peer, false_starts, cause), peer if alone else None)
            return
        if peer.why_killed or not at_fault:
            peer.end = f"{peer.why_killed or f'has not answered for {silent_s:.0f} s'}, and is killed"
        else:
            peer.end = self._describe_end(peer, cause)
        if not was_up:
            peer.end += ", before it was up"
        elif peer.unanswered:
            peer.end += f", at {name_task(self.work, peer.unanswered[0].task)}"
        for future in self._dispatcher.lose(peer, at_fault):
            error = self._death(peer, 0, cause)
            how = self._how_it_ended(error)
            note(error, f"{name_task(self.work, future.task)} ended {future.deaths} workers{how}")
            future.fail(error)
        if peer in self._leaving:
            self._leaving.remove(peer)
            return
        peer.false_starts = false_starts
        if not at_fault and was_up:
            peer.patience_s = min(2 * peer.patience_s, rules.MOST_PATIENCE_S)
        self._replace(peer)

    def _replace(self, peer: P) -> None:
        """Start another worker in the place of a lost one."""
        self._peers[peer.worker] = self._start(peer.worker, peer.false_starts, peer.patience_s)
        self.note_restart(f"{peer.name} {peer.end}")

    def _give_up(self, make_error: Callable[[], BaseException], peer: P | None = None) -> None:
        """Fail all tasks that are not answered, also later ones: a worker is gone for good, or the pool is.

        Args:
            make_error: Makes the error. Each task gets one of its own, since a traceback grows with each raising.
            peer: The worker; only its tasks fail. None for all workers.
        """
        self.breaks()
        self._gone.setdefault(None if peer is None else peer.worker, make_error)
        failed = [one for each in (self._everyone() if peer is None else [peer]) for one in each.unanswered]
        for future in [*self._dispatcher.queued(), *failed]:
            if not future.done() and (make := self._error_for(future.bound)) is not None:
                future.fail(make())

    def resize(self, workers: int) -> None:
        """Have another number of workers from now on. Those that are too many finish the tasks that they have."""
        self._check_owner()
        with InterruptsHeld():
            while len(self._peers) > workers:
                peer = self._peers.pop()
                if peer.lost:
                    continue
                self._leave(peer)
            self.workers = workers
            self._start_more()
            self._dismiss()
            self._deal()

    @property
    def up(self) -> int:
        """How many workers can compute tasks now; the others start."""
        return sum([peer.up for peer in self._peers])

    def _start_more(self) -> None:
        """Start the workers that the pool does not have yet, or some of them, and those that are only prepared."""
        while len(self._peers) < self.workers:
            self._peers.append(self._start(len(self._peers), 0, None))

    def _dismiss(self) -> None:
        """End those workers that leave and have finished their tasks."""
        with InterruptsHeld():
            for peer in [one for one in self._leaving if not one.unanswered]:
                self._leaving.remove(peer)
                peer.lost = True
                self._end(peer)

    def _forget_all(self) -> list[P]:
        """Forget all tasks and workers; return the workers, for `close`."""
        everyone = self._everyone()
        self._peers, self._leaving = [], []
        self._dispatcher.queue.clear()
        self._gone.clear()
        return everyone

    def describe(self, window: Sequence[Future]) -> str:
        """Name the workers of the batch that the reader waits for, and their tasks."""
        late = next(future for future in window if not future.done())
        up = sum(peer.up for peer in self._peers)
        who = "no worker has taken the first of them yet"
        if isinstance(late, Dispatched) and late.holders:
            who = "; ".join(f"{peer} has {peer.name_tasks(self.work)}" for peer in late.holders)
        return f"{who}; {up} of {self.workers} workers are up; {super().describe(window)}"

    def stacks(self, window: Sequence[Future]) -> Sequence[str]:
        """Return the stacks of the workers of the batch that the reader waits for."""
        late = next(future for future in window if not future.done())
        return self._stacks(late.holders) if isinstance(late, Dispatched) else ()

    @property
    def owed(self) -> int:
        """The number of tasks without an answer."""
        return len(self._dispatcher.queued()) + sum(len(peer.unanswered) for peer in self._everyone())
