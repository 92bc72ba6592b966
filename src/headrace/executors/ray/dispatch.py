"""Which worker gets which task: a queue, credits, messages of several tasks, and second copies of overdue batches."""

import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence

from headrace.executors.future import Future
from headrace.executors.ray.peer import OVERDUE_S, RayFuture, RayPeer, overdue_after


class Dispatcher:
    """The tasks that no worker has yet, and the rules by which workers get them.

    Assigned tasks wait in each worker's `unsent` until the pool sends them.

    Args:
        by_any_worker: Whether any worker may compute a task.

    Attributes:
        queue: Tasks that no worker has, the next first. Tasks that nobody waits for any more are dropped.
        bundle: The number of queued tasks that are dealt together: more than one where tasks are short.
        ages: How long the last batches took from being sent to being answered, in seconds.
    """

    def __init__(self, by_any_worker: bool) -> None:
        self.queue: deque[weakref.ref[RayFuture]] = deque()
        self.bundle = 1
        self.ages: deque[float] = deque(maxlen=64)
        self._by_any_worker = by_any_worker
        self._most_tasks = 0
        self._min_message = 1  # the least tasks in a message to an idle worker while others are busy

    @property
    def ready(self) -> bool:
        """Whether enough tasks are queued to be dealt."""
        return len(self.queue) >= self.bundle

    def add(self, future: RayFuture) -> None:
        """Queue a task."""
        self.queue.append(weakref.ref(future))

    def requeue(self, future: RayFuture) -> None:
        """Queue a task that a worker had, before all others."""
        future.sent_s = 0.0
        self.queue.appendleft(weakref.ref(future))
        self.bundle = self._min_message = 1  # it is late already, so it is dealt at once

    def queued(self) -> list[RayFuture]:
        """Return the queued tasks that somebody waits for."""
        return [future for reference in self.queue if (future := reference()) is not None]

    def deal(self, peers: Sequence[RayPeer]) -> None:
        """Assign queued tasks to workers with credit.

        Args:
            peers: The workers that are up.
        """
        self._most_tasks = max(self._most_tasks, len(self.queue) + sum(len(peer.unanswered) for peer in peers))
        # Half of an equal share: the rest is for workers that finish early.
        share = self._most_tasks // max(1, 2 * len(peers))
        least = min(self._most_tasks // 2, max([peer.min_message for peer in peers], default=1))
        self._min_message = max(1, least) if self._by_any_worker else 1
        self.bundle = max(self._min_message, min(share, max([peer.bundle for peer in peers], default=1)))
        kept = []
        while self.queue:
            future = self.queue.popleft()()
            if future is None or future.done():
                continue
            peer = self._choose(future, peers)
            if peer is not None:
                assign(future, peer)
            else:
                kept.append(weakref.ref(future))
                if future.bound is None:
                    break
        self.queue.extendleft(reversed(kept))

    def _choose(self, future: RayFuture, peers: Sequence[RayPeer]) -> RayPeer | None:
        """Return the worker whose message has room, or the one with the fewest tasks; None if no worker has credit."""
        best: RayPeer | None = None
        for peer in peers:
            if future.bound is not None:
                if future.bound == peer.worker:
                    return peer
            elif peer.accepts(future):
                if 0 < len(peer.unsent) < min(peer.bundle, self.bundle):
                    return peer
                if best is None or peer.load < best.load:
                    best = peer
        return best

    def has_idle_worker(self, peers: Iterable[RayPeer]) -> bool:
        """Tell whether a worker is idle and should be sent tasks now.

        It should if the queue has enough tasks for a message, or if all workers are idle.
        """
        busy = [bool(peer.unanswered) for peer in peers if peer.up and not peer.suspect]
        return not all(busy) and (len(self.queue) >= self._min_message or not any(busy))

    def overdue(self, futures: Sequence[Future]) -> RayFuture | None:
        """Return the batch that a reader waits for first if it is overdue and no other worker is likely to bring it."""
        now_s = time.monotonic()
        head = min(
            (one for one in futures if isinstance(one, RayFuture) and one.holders and not one.done()),
            key=lambda one: one.number,
            default=None,
        )
        if head is None or not self.ages or now_s - head.sent_s < OVERDUE_S:
            return None
        overdue_s = overdue_after(self.ages)
        if now_s - head.sent_s < overdue_s:
            return None
        # The second worker may still be at its other tasks, unless it has answered nothing for as long.
        if len(head.holders) > 1 and any(now_s - one.last_answer_s < overdue_s for one in head.holders):
            return None
        return head


def hedge(head: RayFuture, peers: Sequence[RayPeer]) -> None:
    """Assign an overdue batch, and all other tasks of its workers, to other workers too; the first answer counts."""
    for holder in head.holders:
        holder.suspect = True
    for future in {future: None for holder in head.holders for future in holder.unanswered}:
        others = [one for one in peers if one.may_hedge(future)]
        if others and all(one.suspect for one in future.holders) and not future.done():
            assign(future, min(others, key=lambda one: one.load))


def assign(future: RayFuture, peer: RayPeer) -> None:
    """Assign a task to a worker; it is sent with the worker's next message."""
    now_s = time.monotonic()
    future.worker = peer.worker
    future.sent_s = future.sent_s or now_s
    if not peer.unanswered:
        peer.last_answer_s = now_s
    future.holders.append(peer)
    peer.unanswered.append(future)
    peer.unsent.append(future)
