"""Passes over an iterable dataset."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from headrace.datasets.deferred import Deferred
from headrace.datasets.told_epoch import tell_epoch
from headrace.errors import whole_number
from headrace.plan.state import State
from headrace.progress.base import MOST_BATCHES, Pass, count_samples, packed, unpacked
from headrace.progress.schedule import HasState, Schedule
from headrace.system.interrupts import InterruptsHeld
from headrace.system.user_warnings import warn_user
from headrace.types import StreamPlace, StreamStart, StreamTask, Task
from headrace.worker.streams import has_state, state_between


class StreamPass(Pass):
    """A pass over an iterable dataset, of which each worker reads a copy.

    Its state belongs to this rank and to the same number of workers. A dataset, or its iterator, that has `state_dict`
    and `load_state_dict` is asked for its state after each batch. Any other is read again from its beginning, and the
    samples that were delivered before are dropped. A state between two passes holds the dataset's own state where the
    next pass begins with it: where the rank's own process reads the dataset, or workers persist.

    Args:
        schedule: The loader's place in the epochs.
        workers: The number of copies; 0 where the rank's own process reads the dataset.
        batches: Yields a placeholder for each batch, as long as the batch; torch's samplers do.
        length: Counts the batches of an epoch; it may raise TypeError.
        batched: Whether a task is a list of samples.
        persistent: Whether workers outlive the pass.
        before: The pass before, of workers that persist.
        promised: The value that the loader's `len()` has returned, or None. More batches than that cause a warning.

    Attributes:
        stream: The number of the pass, which keys its random numbers where there is no seed.
        starts: Where each worker begins.
        first_worker: The worker that gets the first task.
        base_seed: The base seed of the workers; None before they begin.
    """

    def __init__(
        self,
        schedule: Schedule,
        workers: int,
        batches: Iterable[Any],
        length: Callable[[], int],
        batched: bool,
        persistent: bool = False,
        before: HasState | None = None,
        promised: int | None = None,
    ) -> None:
        self._workers, self._batches, self._persistent = workers, batches, persistent
        self._length, self._batched, self._promised = length, batched, promised
        self._found = before._ends if isinstance(before, StreamPass) and before._over else {}
        self.base_seed: int | None = None
        self._tasks: Iterator[Task] = iter(())
        world, share = schedule.source.world(), schedule.source.stream_share()
        super().__init__(
            schedule,
            rank=world.rank,
            world_size=world.size,
            batch_size=schedule.source.batch_size,
            num_workers=workers,
            split="in runs" if share is not None and share.run > 1 else share is not None,
        )

    def _begin(self) -> None:
        self.starts = [StreamStart()] * max(self._workers, 1)
        self.first_worker = 0
        self._saved_stream = 0
        super()._begin()
        if not self._workers:
            self._found = self._held_here()
        self._ends: dict[int, Any] = {}
        self._reached_by = list(self.starts)
        self._next = self.first_worker
        self._last = -1

    def _take(self) -> None:
        self.starts = [_start(*saved) for saved in self.local["starts"]]
        last = len(self.starts) - 1
        self.first_worker = whole_number("next_worker", self.local["next_worker"], high=last)
        if not self.start.samples:  # between two passes
            return
        self._saved_stream = whole_number("stream", self.local["stream"], low=1)
        # Older releases left it out under a seed of the loader's.
        if self.local["base_seed"] is not None or not self._schedule.source.keys_stream():
            self.base_seed = whole_number("base_seed", self.local["base_seed"])

    def open(self) -> None:
        """Give the pass its number, and begin its endless tasks."""
        if self._workers and self._schedule.source.tells_stream():
            # Workers tell their copies, too, all at once: an epoch in shared memory must be right before they do.
            tell_epoch(self._schedule.source.dataset, self.start.epoch)
        self.stream = self._schedule.streams = self._saved_stream or self._schedule.streams + 1
        self._tasks = map(partial(StreamTask, self.stream, self.start.epoch), iter(self._batches))

    def tasks(self, first: int = 0) -> Iterator[Task]:
        """Return the tasks, without end."""
        return self._tasks

    def revised(self) -> Iterator[Task] | None:
        """Return other tasks if `set_epoch` was called between `iter()` and the first batch and changes the samples.

        A stream that is not keyed by the epoch, and was not resumed, stays: workers have begun to read it.
        """
        another = self.resumed or self._schedule.source.tells_stream()
        if not (self._moves() and another):
            return None
        self.open()
        return self._tasks

    def size(self, task: Task) -> int:
        """Count the samples that a task asks for."""
        return count_samples(task, self._batched)

    def length(self) -> int:
        """Count the batches of an epoch, as the dataset says."""
        return self._length()

    def delivering(self, nth: int, number: int, worker: int, samples: int, resume: Any, last: bool) -> None:
        """Count a batch, once."""
        if number == self._last:  # delivered again, after an interrupt
            return
        with InterruptsHeld():
            self._last = number
            self._count = nth
            self._samples += samples
            before = self._reached_by[worker]
            place = resume or StreamPlace(checksum=before.place.checksum)
            self._reached_by[worker] = StreamStart(before.batches + 1, before.read + samples, place)
            self._next = worker + 1
        if self._promised is not None and nth > self._promised:
            self._warn_of_more(nth)

    def _warn_of_more(self, fetched: int) -> None:
        """Warn, as torch does, that the dataset yields more than its length."""
        message = (
            f"Length of IterableDataset {self._schedule.source.dataset} was reported to be {self._promised}"
            f"(when accessing len(dataloader)), but {fetched} samples have been fetched. "
        )
        if self._workers:
            message += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        warn_user(message)

    def exhausted(self, worker: int, of_dataset: Any) -> None:
        """Keep the state that a copy of the dataset has at its end: the next pass begins with it."""
        if of_dataset is not None:
            self._ends[worker] = of_dataset

    def ended(self, finished: bool) -> None:
        """Advance the epoch, or, where its randomness is keyed by it, note that it was broken off."""
        super().ended(finished)
        if not finished and self._count and self._schedule.source.tells_stream():
            self._schedule.abandon(self.start, f"{self._count} batches")

    def state(self) -> State:
        """Return the place after the last batch that was delivered."""
        if self._over:
            ends = self._ends if self._workers else self._held_here()
            return self._between(1, ends if self._persistent or not self._workers else {})
        if not (self._count or self.start.rank_local):
            return self._between(0, self._found)
        return super().state()

    def _between(self, epochs: int, held: Mapping[int, Any]) -> State:
        """Return a state at the beginning of an epoch, with the state of each worker's copy of the dataset then."""
        if not held:
            return self._at(epochs, 0)
        starts = [StreamStart(place=StreamPlace(held.get(worker))) for worker in range(max(self._workers, 1))]
        return self._at(epochs, 0, starts=self._saved(starts), next_worker=0)

    def _reached(self) -> State:
        return self._at(
            0,
            self._samples,
            starts=self._saved(self._reached_by),
            next_worker=self._next % len(self._reached_by),
            stream=self.stream,
            base_seed=self.base_seed,
        )

    def _saved(self, starts: Iterable[StreamStart]) -> list[Any]:
        dataset = self._schedule.source.dataset
        return [
            (batches, read, *("" if own is None else packed(own, dataset) for own in place[:2]), place.checksum)
            for batches, read, place in starts
        ]

    def _held_here(self) -> dict[int, Any]:
        """Return the present state of the rank's own copy of the dataset, under worker 0; nothing if it keeps none."""
        dataset = self._schedule.source.dataset
        dataset = dataset.built_here if isinstance(dataset, Deferred) else dataset
        keeps_state = has_state(dataset) and not self._schedule.source.splits_stream()
        state = state_between(dataset) if keeps_state else None
        return {} if state is None else {0: state}


def _start(batches: Any, read: Any, of_dataset: str, of_iterator: str = "", checksum: Any = None) -> StreamStart:
    """Read what `_saved` wrote of a worker; older releases wrote the first three alone."""
    place = StreamPlace(
        unpacked(of_dataset) if of_dataset else None,
        unpacked(of_iterator) if of_iterator else None,
        None if checksum is None else whole_number("checksum", checksum),
    )
    return StreamStart(whole_number("batches", batches, high=MOST_BATCHES), whole_number("read", read), place)
