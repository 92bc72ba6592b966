"""The positions, indices and seeds of several steps of a plan, evaluated together."""

from dataclasses import dataclass, field

from headrace.plan.keys import Words, batches_seeds, sample_words
from headrace.plan.plan import Plan
from headrace.types import Indices, PlanTask, Positions

_MOST_SHARED = 256
"""The most samples, in one step of every worker together, for which a worker evaluates also the steps of the others."""


@dataclass
class Steps:
    """Consecutive steps of a plan.

    Attributes:
        first: The first of them.
        size: Samples in a step; the epoch's last step may have fewer. Steps of different sizes are evaluated singly.
        positions: Of all samples, shape (n,).
        indices: Of all samples, shape (n,).
    """

    first: PlanTask
    size: int
    positions: Positions
    indices: Indices
    _seeds: tuple[Words, list[list[int]]] | None = field(init=False, default=None)

    @classmethod
    def of(cls, plan: Plan, first: PlanTask, workers: int) -> "Steps":
        """Evaluate steps from a first one on: several, unless other workers compute most of those."""
        if not plan.even:
            positions, indices = plan.span(*first)
            return cls(first, len(positions), positions, indices)
        alone = workers > 1 and workers * plan.batch_size > _MOST_SHARED
        return cls(first, plan.batch_size, *(plan.span(*first, most=1) if alone else plan.span(*first)))

    def samples(self, task: PlanTask) -> slice | None:
        """Return which of the samples belong to a task; None if the task is not among these steps."""
        first = self.first
        start = (task.step - first.step) * self.size
        inside = (task.epoch, task.cursor) == (first.epoch, first.cursor) and 0 <= start < len(self.positions)
        return slice(start, start + self.size) if inside else None

    def words(self, samples: slice, seed: int) -> tuple[Words, list[int]]:
        """Return the seeds of the generators for the samples of a step, shape (n, 3), and for their collation."""
        if self._seeds is None:  # for all steps: numpy's calls take longer than what they compute for one
            epoch = self.first.epoch
            of_batches = batches_seeds(seed, epoch, self.positions[:: self.size].tolist())
            self._seeds = sample_words(seed, epoch, self.positions), of_batches
        words, of_batches = self._seeds
        return words[samples], of_batches[samples.start // self.size]
