"""The tasks of a pool, and which worker gets which of them. Nothing here waits, sends, or asks what time it is."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace.executors.dispatch import rules
from headrace.executors.dispatch.peer import Dispatched, Peer, unfinished
from headrace.executors.future import Future


class Dispatcher:
    """The tasks that no worker has yet, and the rules by which workers get them.

    Assigned tasks wait in each worker's `unsent` until the pool sends them.

    Args:
        by_any_worker: Whether any worker may compute a task, so that a second one may compute it, too.
        deals_all: Whether workers get all tasks at once, in equal shares, so that they have work while the rank does
            something else. Otherwise tasks wait in the queue for the worker that is free first.
        clock: Returns the time, in seconds.

    Attributes:
        queue: Tasks that no worker has, the next first. Tasks that nobody waits for any more are dropped.
        bundle: The number of queued tasks that are dealt together: more than one where tasks are short.
        ages: How long the last batches took from being sent to being answered, in seconds.
        times: How long they took their workers, in seconds: without waiting for a rank that does something else.
    """

    def __init__(self, by_any_worker: bool, deals_all: bool, clock: Callable[[], float]) -> None:
        self.queue: deque[weakref.ref[Dispatched]] = deque()
        self.bundle = 1
        self.ages: deque[float] = deque(maxlen=64)
        self.times: deque[float] = deque(maxlen=64)
        self._by_any_worker = by_any_worker
        self._deals_all = deals_all
        self._clock = clock
        self._most_tasks = self._least_credit = 0
        self._min_message = 1  # the least tasks in a message to an idle worker while others are busy

    @property
    def ready(self) -> bool:
        """Whether enough tasks are queued to be dealt."""
        return len(self.queue) >= self.bundle

    def add(self, future: Dispatched) -> None:
        """Queue a task."""
        self.queue.append(weakref.ref(future))

    def requeue(self, future: Dispatched) -> None:
        """Queue a task that a worker had, before all others."""
        future.sent_s = 0.0
        self.queue.appendleft(weakref.ref(future))
        self.hurry()

    def hurry(self) -> None:
        """Have queued tasks dealt at once, however few they are: they are late already."""
        self.bundle = self._min_message = 1

    def queued(self) -> list[Dispatched]:
        """Return the queued tasks that somebody waits for."""
        return [future for reference in self.queue if (future := reference()) is not None]

    def direct(self, future: Dispatched, peers: Sequence[Peer[Any]]) -> Peer[Any] | None:
        """Assign a task where `deal` would do nothing else; return the worker, to which it must be sent at once.

        Most tasks are long enough to go alone, and to a worker that has room. This takes a third of the time.
        """
        bound = future.bound
        if bound is not None:
            peer = peers[bound] if bound < len(peers) else None
            if peer is None or not peer.takes:
                return None
        else:
            if self.bundle > 1:
                return None
            peer = None
            for one in peers:
                if one.bundle > 1 or not one.up:
                    return None
                if one.accepts(future, self._least_credit) and (peer is None or one.load < peer.load):
                    peer = one
            if peer is None:
                return None
        self.assign(future, peer)
        peer.unsent.clear()
        return peer

    def deal(self, peers: Sequence[Peer[Any]], workers: int) -> None:
        """Assign queued tasks to workers with credit.

        Args:
            peers: The workers that tasks can be sent to.
            workers: The number of workers, those included that start.
        """
        self._most_tasks = max(self._most_tasks, len(self.queue) + sum([len(peer.unanswered) for peer in peers]))
        # Half of an equal share: the rest is for workers that finish early.
        share = self._most_tasks // max(1, 2 * len(peers))
        least = min(self._most_tasks // 2, max([peer.min_message for peer in peers], default=1))
        self._min_message = max(1, least) if self._by_any_worker else 1
        self.bundle = max(self._min_message, min(share, max([peer.bundle for peer in peers], default=1)))
        self._least_credit = -(-self._most_tasks // workers) if self._deals_all else 0
        kept = []
        while self.queue:
            future = self.queue.popleft()()
            if future is None or future.done():
                continue
            peer = self._choose(future, peers)
            if peer is not None:
                self.assign(future, peer)
            else:
                kept.append(weakref.ref(future))
                if future.bound is None:
                    break
        self.queue.extendleft(reversed(kept))

    def _choose(self, future: Dispatched, peers: Sequence[Peer[Any]]) -> Peer[Any] | None:
        """Return the worker whose message has room, or the one with the fewest tasks; None if no worker has credit."""
        best: Peer[Any] | None = None
        for peer in peers:
            if future.bound is not None:
                if future.bound == peer.worker:
                    return peer
            elif peer.accepts(future, self._least_credit):
                if 0 < len(peer.unsent) < min(peer.bundle, self.bundle):
                    return peer
                if best is None or peer.load < best.load:
                    best = peer
        return best

    def has_idle_worker(self, peers: Iterable[Peer[Any]]) -> bool:
        """Tell whether a worker is idle and should be sent tasks now.

        It should if the queue has enough tasks for a message, or if all workers are idle.
        """
        busy = [bool(peer.unanswered) for peer in peers if peer.takes and not (peer.suspect or peer.leaving)]
        return not all(busy) and (len(self.queue) >= self._min_message or not any(busy))

    def assign(self, future: Dispatched, peer: Peer[Any]) -> None:
        """Assign a task to a worker; it is sent with the worker's next message."""
        now_s = self._clock()
        future.worker = peer.worker
        future.sent_s = future.sent_s or now_s
        if not peer.unanswered:
            peer.last_answer_s = now_s
        future.holders.append(peer)
        peer.unanswered.append(future)
        peer.unsent.append(future)

    def set_up(self, peer: Peer[Any]) -> None:
        """Note that a worker is set up: only now can it begin the tasks that it has."""
        peer.takes = peer.up = True
        peer.last_answer_s = self._clock()

    def answered(self, future: Dispatched, peer: Peer[Any], was_done: bool) -> bool:
        """Note that a worker has answered a task; return whether it still had the task.

        Args:
            future: The future of the task.
            peer: The worker.
            was_done: Whether another worker had answered it before.
        """
        now_s = self._clock()
        began_s, peer.last_answer_s = peer.last_answer_s, now_s
        peer.suspect = False
        peer.patience_s = rules.PATIENCE_S
        if peer not in future.holders:  # it was given to another worker meanwhile
            return False
        if peer.unanswered[0] is future:
            peer.unanswered.popleft()
        else:
            peer.unanswered.remove(future)
        future.holders.remove(peer)
        if not was_done:
            future.took_s = now_s - began_s
            # What a slower worker delayed says nothing about how long a batch takes.
            self.ages.append(future.took_s if future.holders else now_s - future.sent_s)
            self.times.append(peer.last_task_s)
        return True

    # Workers that are late, lost or not needed.

    def overdue(self, futures: Sequence[Future], peers: Sequence[Peer[Any]]) -> Dispatched | None:
        """Return the batch that a reader waits for first if it is overdue and no other worker is likely to bring it.

        If no worker has that batch yet, it is the one that keeps a worker from it longest.
        """
        now_s = self._clock()
        head = min(
            (one for one in futures if isinstance(one, Dispatched) and not one.done()),
            key=lambda one: one.number,
            default=None,
        )
        if head is None:
            return None
        since_s = head.sent_s
        if not head.holders:
            busy = [one for one in peers if one.up and one.unanswered and not one.unanswered[0].done()]
            if not busy:
                return None
            first = min(busy, key=lambda one: one.last_answer_s)
            head, since_s = first.unanswered[0], first.last_answer_s
        if now_s - since_s < rules.OVERDUE_S or now_s - since_s < (overdue_s := rules.overdue_after(self.ages)):
            return None
        # The second worker may still be at its other tasks, unless it has answered nothing for as long.
        if len(head.holders) > 1 and any(now_s - one.last_answer_s < overdue_s for one in head.holders):
            return None
        return head

    def hedge(self, head: Dispatched, peers: Sequence[Peer[Any]], everyone: Sequence[Peer[Any]]) -> None:
        """Assign an overdue batch, and all other tasks of its workers, to a second worker; the first answer counts.

        Args:
            head: The batch.
            peers: The workers that may get tasks.
            everyone: Those and the ones that leave. If the batch hangs at both of its workers, the tasks of all that do
                not answer are assigned again: the reader is going to wait for those next.
        """
        late: list[Peer[Any]] = [*head.holders]
        now_s = self._clock()
        if len(late) >= rules.MOST_COPIES:
            late += [one for one in everyone if one.up and now_s - one.last_answer_s > one.patience_s]
        for holder in late:
            holder.suspect = holder.suspect or bool(holder.unanswered)
        for future in {future: None for holder in late for future in holder.unanswered}:
            if future.done() or not all(one.suspect for one in future.holders):
                continue
            if len(live_holders(future, now_s)) < rules.MOST_COPIES:
                other = self._second(future, peers)
                if other is not None:
                    self.assign(future, other)

    def _second(self, future: Dispatched, peers: Sequence[Peer[Any]]) -> Peer[Any] | None:
        """Return the worker that should compute a task, too, rather on another host: a host may be lost as a whole."""
        hosts = {one.host for one in future.holders}
        others = [one for one in peers if one.may_hedge(future)]
        return min(others, key=lambda one: (one.host in hosts, one.load), default=None)

    def needs_spare(self, peers: Sequence[Peer[Any]], everyone: Sequence[Peer[Any]]) -> Peer[Any] | None:
        """Return the worker beside which another should be started, since none answers that could help out another.

        That is the one that has been silent longest. It keeps its tasks, since it may still answer.
        """
        now_s = self._clock()
        if any(not one.up or now_s - one.last_answer_s < one.patience_s for one in peers):
            return None
        present = [one.unanswered[0] for one in everyone if one.unanswered]
        if any(
            len(live_holders(one, now_s)) < rules.MOST_COPIES and self._second(one, peers) is None for one in present
        ):
            return min(peers, key=lambda one: one.last_answer_s)
        return None

    def hung(self, everyone: Sequence[Peer[Any]], timeout_s: float | None) -> Dispatched | None:
        """Return a task that hangs: all workers that have it are at it for too long, and no other could try it.

        Args:
            everyone: All workers, those included that leave.
            timeout_s: The user's time limit for a batch, in seconds; None if there is none.
        """
        now_s, limit_s = self._clock(), rules.hangs_after(self.times, timeout_s)
        for peer in everyone:
            future: Dispatched | None = peer.unanswered[0] if peer.unanswered else None
            if future is None or future.done():
                continue
            live = live_holders(future, now_s)
            alone = len(live) < rules.MOST_COPIES
            if alone and (self._second(future, everyone) is not None or not all(one.up for one in everyone)):
                continue
            if all(one.time_at(future, now_s) > limit_s for one in live):
                return future
        return None

    def lose(self, peer: Peer[Any], at_fault: bool) -> list[Dispatched]:
        """Queue the tasks of a lost worker again; return those that have ended too many workers.

        Args:
            peer: The worker.
            at_fault: Whether its present task may have ended it.
        """
        owed = unfinished(peer)
        if at_fault and peer.up and owed and owed[0] is peer.unanswered[0]:
            owed[0].deaths += 1
        self._take_back(peer, [*peer.unanswered])
        peer.lost, peer.up, peer.takes = True, False, False
        return [future for future in owed if future.deaths >= rules.MOST_DEATHS]

    def leave(self, peer: Peer[Any]) -> None:
        """Give a worker no more tasks. Those that were not sent yet are queued again."""
        peer.leaving = True
        self._take_back(peer, [*peer.unsent])

    def _take_back(self, peer: Peer[Any], futures: Sequence[Dispatched]) -> None:
        """Take tasks from a worker, and queue those that no other worker has."""
        for future in sorted(futures, key=lambda one: one.number, reverse=True):
            future.holders.remove(peer)
            peer.unanswered.remove(future)
            if not (future.holders or future.done() or future.deaths >= rules.MOST_DEATHS):
                self.requeue(future)
        peer.unsent.clear()


def live_holders(future: Dispatched, now_s: float) -> list[Peer[Any]]:
    """Return the workers that compute a task or will soon: not those at which it waits behind one that may hang."""
    holders = future.holders
    return [one for one in holders if one.unanswered[0] is future or now_s - one.last_answer_s < one.patience_s]
