"""The positions, indices and seeds of several steps of a plan, evaluated together."""

from dataclasses import dataclass, field

import numpy as np

from headrace.plan.keys import Words, batches_seeds, sample_words
from headrace.plan.plan import Plan
from headrace.types import Indices, PlanTask, Positions

_MOST_SHARED = 256
"""The most samples, in one step of every worker together, for which a worker evaluates also the steps of the others."""

_SEEDED_AHEAD = 1024
"""How many samples are seeded at a time, about."""


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
    _words: Words = field(init=False, default_factory=lambda: np.empty((0, 3), np.uint64))
    _words_from: int = field(init=False, default=0)
    _batch_words: list[list[int]] = field(init=False, default_factory=list)

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
        """Return the seeds of the generators for the samples of a step, shape (n, 3), and for their collation.

        Those of the next steps are computed with them.
        """
        start, stop = samples.start - self._words_from, samples.stop - self._words_from
        if not 0 <= start < len(self._words):
            ahead = self.positions[samples.start : samples.start + max(1, _SEEDED_AHEAD // self.size) * self.size]
            self._words, self._words_from = sample_words(seed, self.first.epoch, ahead), samples.start
            self._batch_words = batches_seeds(seed, self.first.epoch, ahead[:: self.size].tolist())
            start, stop = 0, self.size
        return self._words[start:stop], self._batch_words[start // self.size]
