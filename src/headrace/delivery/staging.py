"""The staging queue: batches that are computed and not delivered yet, and errors in the places of batches."""

from collections import deque
from typing import Any, TypeAlias

from headrace.executors.future import Future
from headrace.telemetry.stages import Packed

Staged: TypeAlias = tuple[int, int, int, Any, Any, Packed | None, Future | None, Any, BaseException | None]
"""A batch on its way to the user, as a plain tuple, since one is made for every batch: the number of its task in the
pass, from 0; the worker that computed it; the number of its samples; the batch, as the user gets it, or on its way to a
device; the place after it in a worker's copy of an iterable dataset, or None; its packed `StageTimes`, or None if the
caller's thread gathered it; its future, None if the caller's thread computed it; its task; and the error in its place,
or None."""


class StagingQueue:
    """Batches in the order in which they are delivered. What lies in it counts as not delivered.

    A batch leaves the queue after all observers were told of it: if that is interrupted, the batch comes again. Where
    no length tells which batch is the last, staging one batch ahead does.

    Args:
        ahead: The number of batches that are staged in addition to the one that is delivered next.

    Attributes:
        batches: The staged batches, the next one first.
        wanted: The number of batches that are staged before one is delivered; 0 if nothing more will be staged in this
            pass.
    """

    __slots__ = ("_ahead", "batches", "wanted")

    def __init__(self, ahead: int = 0) -> None:
        self._ahead = ahead
        self.batches: deque[Staged] = deque()
        self.wanted = 1 + ahead

    def end(self) -> None:
        """Stage nothing more in this pass."""
        self.wanted = 0

    def clear(self) -> None:
        """Drop everything, for another pass."""
        self.batches.clear()
        self.wanted = 1 + self._ahead
