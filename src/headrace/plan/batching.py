"""Cutting an epoch's positions into global batches, one for each step, and the rules for its end."""

from abc import ABC, abstractmethod

from headrace.types import Tail


class Batching(ABC):
    """Cuts the positions of an epoch into global batches.

    Global batches follow each other without a gap, from the cursor at which a run began the epoch to `end`. Ranks deal
    the positions of each in turn, so that their shares differ by one sample at most. A run may begin at any cursor that
    a run has reached.

    A new way of cutting is a subclass, passed as `Plan(..., batching=...)`; nothing else has to change.

    Args:
        samples: The epoch's samples, >= 1.
        ranks: The size of the world.
        batch_size: The plan's samples per rank and step; a subclass may take it as a mean or a maximum.
        tail: The rule for the end of the epoch.
    """

    even: bool = False
    """Whether every rank has `batch_size` samples at every step but the last; steps are then evaluated together."""

    def __init__(self, samples: int, ranks: int, batch_size: int, tail: Tail) -> None:
        self.samples, self.ranks, self.batch_size, self.tail = samples, ranks, batch_size, tail

    @abstractmethod
    def end(self, epoch: int, cursor: int) -> int:
        """Return the position at which the epoch ends, pads included, if a run begins it at `cursor`."""

    @abstractmethod
    def steps(self, epoch: int, cursor: int) -> int:
        """Count the global batches from `cursor` to `end`."""

    @abstractmethod
    def bounds(self, epoch: int, step: int, cursor: int) -> tuple[int, int]:
        """Return the first position of a step's global batch, and its end: an empty range if there is no such step."""


class EvenBatches(Batching):
    """Global batches of ranks · batch_size samples each."""

    even = True

    def __init__(self, samples: int, ranks: int, batch_size: int, tail: Tail) -> None:
        super().__init__(samples, ranks, batch_size, tail)
        self._global_batch = ranks * batch_size

    def end(self, epoch: int, cursor: int) -> int:
        """Return the epoch's end: as many whole global batches as fit, all samples, or these and the pads."""
        left = self.samples - cursor
        if self.tail == "drop":
            return cursor + left // self._global_batch * self._global_batch
        if self.tail == "pad":
            return cursor - (-left // self.ranks) * self.ranks
        return self.samples

    def steps(self, epoch: int, cursor: int) -> int:
        """Count the global batches; the last may be smaller."""
        return -((cursor - self.end(epoch, cursor)) // self._global_batch)

    def bounds(self, epoch: int, step: int, cursor: int) -> tuple[int, int]:
        """Return the step's range of positions."""
        start = cursor + step * self._global_batch
        stop = start + self._global_batch
        return start, stop if stop <= self.samples else min(stop, self.end(epoch, cursor))
