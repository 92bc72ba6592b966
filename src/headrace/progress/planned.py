"""Passes over a plan."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from headrace.plan import Plan
from headrace.plan.state import State
from headrace.progress.base import Pass
from headrace.progress.schedule import Schedule
from headrace.types import PlanTask, Task


class PlanPass(Pass):
    """A pass over a plan.

    Args:
        schedule: The loader's place in the epochs.
        plan: The plan.
        in_order: Whether batches are delivered in the order of their steps; otherwise states are rank-local.
        allows_early: Whether tasks of the next epoch may be submitted while the last batches of this one are read.

    Attributes:
        plan: The plan.
    """

    steps: int
    repeatable = True
    _local_only = False
    _remedy = "Where batches came in any order a state belongs to one rank; with in_order=True it does not."

    def __init__(self, schedule: Schedule, plan: Plan, in_order: bool, allows_early: bool = False) -> None:
        self.plan, self._in_order, self._allows_early = plan, in_order, allows_early
        super().__init__(schedule, rank=plan.world.rank, world_size=plan.world.size, batch_size=plan.batch_size)

    def _begin(self) -> None:
        super()._begin()
        plan, start = self.plan, self.start
        self.steps = plan.steps(start.epoch, start.samples)
        self._whole_steps = (plan.samples - start.samples) // plan.global_batch if plan.even else 0

    def tasks(self, first: int = 0) -> Iterator[Task]:
        """Return the tasks of this pass, which ends with the epoch, without the first `first` ones."""
        epoch, cursor, done = self.start.epoch, self.start.samples, frozenset(self._skipped)
        left = islice((step for step in range(self.steps) if step not in done), first, None)
        return (PlanTask(epoch, step, cursor) for step in (left if done else range(first, self.steps)))

    def revised(self) -> Iterator[Task] | None:
        """Return the new epoch's tasks if `set_epoch` was called between `iter()` and the first batch; else None."""
        return self.tasks() if self._moves() else None

    def early_tasks(self) -> Iterator[Task]:
        """Return the tasks of the next epoch."""
        epoch = self.start.epoch + 1
        return (PlanTask(epoch, step, 0) for step in range(self.plan.steps(epoch) if self._allows_early else 0))

    def size(self, task: Any) -> int:
        """Count the samples of a task's batch."""
        plan = self.plan
        return plan.batch_size if task[1] < self._whole_steps else plan.size(*task)

    def length(self) -> int:
        """Count the batches of the whole epoch."""
        return self.plan.steps(self.start.epoch)

    def ended(self, finished: bool) -> None:
        """Advance the epoch, or note that it was broken off."""
        super().ended(finished)
        if not finished and self._count:
            self._schedule.abandon(self.start, f"{self._count} of {self.steps} batches")

    def _reached(self) -> State:
        epoch, cursor = self.start.epoch, self.start.samples
        if self._done:
            cursor = self.plan.cursor_after(epoch, self._done - 1, cursor)
        if cursor == self.plan.samples:
            return self._at(1, 0)
        if self._in_order and not self._beyond:
            return self._at(0, cursor)
        return self._at(0, cursor, beyond=sorted(step - self._done for step in self._beyond))
