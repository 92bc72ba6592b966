"""The rank's record of one worker, wherever it runs: its tasks, its speed, and whether it answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from headrace.executors.base import name_task
from headrace.executors.dispatch import rules
from headrace.executors.future import Future

if TYPE_CHECKING:
    from headrace.types import Task
    from headrace.worker.work import Work

_MOST_NAMED = 4
"""The largest number of tasks of a late worker that an error names."""


class Dispatched(Future):
    """The future of a task that is dealt to workers.

    Attributes:
        task: The task.
        number: How many tasks were submitted before it.
        bound: The only worker that may compute it, or None.
        deaths: How many workers died while they computed it.
        sent_s: When it was first given to a worker after it was last queued, in seconds; 0 while it is queued.
        took_s: How long the worker needed that answered first, in seconds; 0 before that.
        holders: The workers that have it.
    """

    bound: int | None = None
    deaths = 0
    sent_s = took_s = 0.0

    def __init__(self, task: Task, number: int) -> None:
        super().__init__(-1)
        self.task = task
        self.number = number
        self.holders: list[Peer[Any]] = []


F = TypeVar("F", bound=Dispatched)


class Peer(Generic[F]):
    """The rank's record of one worker.

    Args:
        worker: Its number.
        false_starts: How many workers with this number died in a row before they were up.
        patience_s: How long it may be silent before it is replaced, in seconds; None for the shortest such time.

    Attributes:
        host: The name of its host; "" for the rank's own.
        used: Whether its process served another pool before, so that its end, before it is set up, says little.
        unanswered: Its tasks, oldest first.
        unsent: Those of its tasks that were not sent yet.
        takes: Whether tasks can be sent to it.
        up: Whether it is set up; from then on, only a task can end it.
        lost: Whether it is gone, and another worker will take its place.
        leaving: Whether it gets no more tasks, since the pool is to have fewer workers.
        why_killed: What it did for which it is killed, as the end of a sentence that begins with its name; else "".
        end: How it ended, once it is lost, as the end of such a sentence.
        suspect: Whether the reader waited for one of its tasks until it was overdue; an answer clears this.
        task_s: The average time of its tasks, in seconds; 0 before the first answer.
        last_task_s: The time of its last task, in seconds.
        last_answer_s: When it last answered, was set up, or got a task while it had none, in seconds.
        credit: The number of tasks that it may have.
        bundle: The number of tasks in one message: several if they are short and their batches small.
        min_message: The least number of tasks in a message to it while it is idle and others are busy.
    """

    host = why_killed = end = ""
    used = False

    def __init__(self, worker: int, false_starts: int = 0, patience_s: float | None = None) -> None:
        self.worker = worker
        self.false_starts = false_starts
        self.patience_s = patience_s or rules.PATIENCE_S
        self.unanswered: deque[F] = deque()
        self.unsent: list[F] = []
        self.takes = self.up = self.lost = self.leaving = self.suspect = False
        self.task_s = self.last_task_s = self.last_answer_s = 0.0
        self.credit, self.bundle, self.min_message = rules.CREDIT, 1, 1
        self._rated_s, self._rated_fits = 0.0, 0  # what these three were calculated from

    def note_speed(self, task_s: float, fits: int, message_s: float = rules.MESSAGE_S) -> None:
        """Note how long a task took and how large its batch was.

        Args:
            task_s: The time of the task, in seconds.
            fits: The number of such batches that fit into one message.
            message_s: The least work in one message, in seconds.
        """
        self.last_task_s = task_s
        gain = rules.WEIGHT_SHORTER if task_s < self.task_s else rules.WEIGHT_LONGER
        self.task_s += gain * (task_s - self.task_s) if self.task_s else task_s
        if fits == self._rated_fits and abs(self.task_s - self._rated_s) < rules.RATED_AGAIN * self._rated_s:
            return
        self._rated_s, self._rated_fits = self.task_s, fits
        each = max(self.task_s, 1e-6)
        self.credit = int(min(max(rules.CREDIT, rules.BUSY_S / each), rules.MOST_CREDIT))
        self.bundle = int(max(1, min(rules.BUSY_S / rules.CREDIT / each, rules.MOST_BUNDLE, fits)))
        self.min_message = max(1, min(self.bundle, int(message_s / each)))

    def accepts(self, future: Dispatched, least_credit: int = 0) -> bool:
        """Tell whether a task may be assigned to it now.

        Args:
            future: The future of the task.
            least_credit: The number of tasks that it may have at least.
        """
        if not self.takes or self.suspect or self.leaving or self in future.holders:
            return False
        # Several tasks leave it open which one ended a worker, since an answer may be lost with it. One task does not.
        if self.unanswered and max(future.deaths, self.unanswered[0].deaths) >= rules.DOUBTFUL:
            return False
        return len(self.unanswered) < max(self.credit, least_credit)

    def may_hedge(self, future: Dispatched) -> bool:
        """Tell whether a task that another worker has may be assigned to it, too."""
        if not self.up or self.suspect or self.leaving or self in future.holders:
            return False
        return future.deaths < rules.DOUBTFUL or not self.unanswered

    def next_bundle(self) -> list[F]:
        """Remove and return the unsent tasks that go into the next message."""
        if self.bundle == 1:
            return [self.unsent.pop(0)]
        # A task at which workers died goes alone, so that another one's fault is not counted as its own. So does one
        # that another worker has: its answer must not wait for those of other tasks, which may hang.
        late = (place for place, one in enumerate(self.unsent[: self.bundle]) if one.deaths or len(one.holders) > 1)
        count = next(late, self.bundle) or 1
        some, self.unsent = self.unsent[:count], self.unsent[count:]
        return some

    def silent(self, now_s: float) -> bool:
        """Tell whether it should be replaced: it has not answered for long, and others have finished what it is at."""
        # A task that no other worker has finished may just take long.
        if not (self.up and self.unanswered and self.unanswered[0].done()):
            return False
        return now_s - self.last_answer_s > rules.patience(self.patience_s, self.unanswered[0].took_s)

    def time_at(self, future: Dispatched, now_s: float) -> float:
        """Return how long it has been computing a task, in seconds; 0 if it has not begun it, or is not up."""
        return now_s - self.last_answer_s if self.up and self.unanswered and self.unanswered[0] is future else 0.0

    def drop_tasks(self) -> None:
        """Forget all tasks: it and its futures refer to each other."""
        for future in self.unanswered:
            future.holders.clear()
        self.unanswered.clear()
        self.unsent.clear()

    @property
    def load(self) -> tuple[bool, bool, int]:
        """Sorts workers: the one with the smallest load gets the next task."""
        return self.suspect, not self.up, len(self.unanswered)

    def name_tasks(self, work: Work) -> str:
        """Name its tasks, oldest first: short tasks are answered together, so any of them may be the late one."""
        named = " and ".join(name_task(work, one.task) for one in islice(self.unanswered, _MOST_NAMED))
        more = len(self.unanswered) - _MOST_NAMED
        return f"{named} and {more} more" if more > 0 else named

    @property
    def name(self) -> str:
        """Its number, and its process where that is known."""
        return f"worker {self.worker}"

    def __str__(self) -> str:
        return self.name


def unfinished(peer: Peer[Any]) -> Sequence[Dispatched]:
    """Return the tasks of a worker that no worker has answered, the oldest first."""
    return [one for one in peer.unanswered if not one.done()]
