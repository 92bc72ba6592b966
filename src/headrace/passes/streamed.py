"""Passes over an iterable dataset."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from headrace.errors import whole_number
from headrace.interrupts import InterruptsHeld
from headrace.passes.base import Pass, packed, unpacked
from headrace.plan.state import State
from headrace.schedule import Schedule
from headrace.types import StreamStart, StreamTask, Task


class StreamPass(Pass):
    """A pass over an iterable dataset, of which each worker reads a copy.

    Its state belongs to this rank and as many workers. A dataset that has `state_dict` and `load_state_dict` is asked
    for its state after each batch; any other is read again from its beginning, and what was delivered is thrown away.

    Args:
        schedule: Whose epoch is read.
        workers: How many copies there are.
        batches: What the loader samples from: items, or lists of as many as a batch has samples.

    Attributes:
        stream: The number of the pass, which keys what it draws where there is no seed.
        starts: Where each worker begins.
        first_worker: Whose turn it is.
        base_seed: Torch's seed of the workers, if they have one.
    """

    def __init__(self, schedule: Schedule, workers: int, batches: Iterable[Any]) -> None:
        self._workers, self._batches = workers, batches
        self.base_seed: int | None = None
        world, share = schedule.world(), schedule.dealing()
        super().__init__(
            schedule,
            rank=world.rank,
            world_size=world.size,
            batch_size=schedule.batch_size,
            num_workers=workers,
            split="in runs" if share is not None and share.run > 1 else share is not None,
        )

    def _begin(self) -> None:
        self.starts = [StreamStart()] * max(self._workers, 1)
        self.first_worker = 0
        self._saved_stream = 0
        super()._begin()
        self._reached_by = list(self.starts)
        self._next = self.first_worker
        self._last = -1

    def _take(self) -> None:
        self.starts = [
            StreamStart(whole_number("batches", batches), whole_number("read", read), unpacked(own) if own else None)
            for batches, read, own in self.local["starts"]
        ]
        last = len(self.starts) - 1
        self.first_worker = whole_number("next_worker", self.local["next_worker"], high=last)
        self._saved_stream = whole_number("stream", self.local["stream"], low=1)
        if not self._schedule.keys_stream():
            self.base_seed = whole_number("base_seed", self.local["base_seed"])

    def tasks(self) -> Iterator[Task]:
        """Begin a stream and return its tasks, without end."""
        self.stream = self._schedule.streams = self._saved_stream or self._schedule.streams + 1
        return map(partial(StreamTask, self.stream, self.start.epoch), iter(self._batches))

    def revised(self) -> Iterator[Task] | None:
        """Return other tasks if the epoch was set between `iter()` and the first batch and makes another stream.

        One that is neither keyed by the epoch nor gone on with is read already, and has no other beginning.
        """
        another = self.resumed or self._schedule.keys_stream()
        return self.tasks() if self._moves() and another else None

    def delivering(self, nth: int, number: int, worker: int, samples: int, resume: Any) -> None:
        """Count a batch of a worker's, once."""
        if number == self._last:  # it comes again, after an interrupt
            return
        with InterruptsHeld():
            self._last = number
            self._count = nth
            self._samples += samples
            before = self._reached_by[worker]
            self._reached_by[worker] = StreamStart(before.batches + 1, before.read + samples, resume)
            self._next = worker + 1

    def ended(self, finished: bool) -> None:
        """Advance the epoch, or, where its randomness is keyed by it, note that it was broken off."""
        super().ended(finished)
        if not finished and self._count and self._schedule.keys_stream():
            self._schedule.abandon(self.start, f"{self._count} batches")

    def _reached(self) -> State:
        starts = [
            (one.batches, one.read, "" if one.state is None else packed(one.state, self._schedule.dataset))
            for one in self._reached_by
        ]
        return self._at(
            0,
            self._samples,
            starts=starts,
            next_worker=self._next % len(starts),
            stream=self.stream,
            base_seed=self.base_seed,
        )
