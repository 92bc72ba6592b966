"""What a worker does: fetch, collate, seed; one picklable description, the same for every executor."""

import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, StackDataset, Subset
from torch.utils.data._utils import worker as torch_worker

from headrace.gather import NOT_GATHERED, Allocate, gather, no_memory, rows_of
from headrace.plan.keys import generator_seeds, key
from headrace.plan.plan import Plan
from headrace.randomness import Generators, callers_generators_kept, seed_from_words, seed_worker
from headrace.types import IndexTask, Indices, PlanTask, Positions, Rows, StreamTask, Tail, Task, World


class StreamEnd(Enum):
    """What a task on an iterable dataset yields when the worker's copy is at its end; one object per process."""

    STREAM_END = auto()


STREAM_END = StreamEnd.STREAM_END


class Portion(NamedTuple):
    """A batch of an iterable dataset, and how many samples it holds, which only its worker knows."""

    samples: int
    batch: Any


@dataclass(frozen=True)
class StreamShare:
    """How an iterable dataset is dealt over ranks: sample j goes to rank j mod W.

    Every rank reads the whole stream and keeps its share; with several workers each of them deals its own stream, so
    that shares may differ by a sample per worker. `tail` rules an unfinished last round of W samples:
    "exact" gives them to the first ranks, "drop" to none, and "pad" repeats to each other rank its first
    sample.
    """

    world: World
    tail: Tail

    def of(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Return this rank's samples of the stream."""
        return _Dealt(self, stream)


class _Dealt:
    """A rank's share of a stream; not a generator, since it must go on after the stream raised an error."""

    def __init__(self, share: StreamShare, stream: Iterator[Any]) -> None:
        self._rank, self._size, self._tail = share.world.rank, share.world.size, share.tail
        self._stream = stream
        self._read = 0
        self._first: Any = None
        self._mine: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for sample in self._stream:
            place = self._read % self._size
            if self._read in (0, self._rank):
                self._first = sample
            self._read += 1
            if place == self._rank:
                self._mine = sample
            # An equal share may be given only when the round is known to be whole.
            if place == (self._rank if self._tail == "exact" else self._size - 1):
                return self._mine
        unfinished = self._read % self._size
        self._read = 0
        self._stream = iter(())
        if self._tail == "pad" and unfinished:
            return self._mine if unfinished > self._rank else self._first
        raise StopIteration


@dataclass
class Work:
    """Everything a worker needs to know, fixed while a pool of workers lives.

    Attributes:
        dataset: The user's dataset.
        collate_fn: Merges samples to a batch, or converts the single sample where `batched` is false.
        batched: Whether a task covers a list of samples.
        stacks: Whether `collate_fn` does what torch's default collation does, so that batches of in-memory datasets
            may be gathered whole.
        allocate: Gives memory for what is gathered.
        drop_last: Iterable datasets only: whether a worker's short last batch is dropped.
        plan: Works out what a `PlanTask` covers; None where a sampler decides.
        share: Splits an iterable dataset over the ranks; None where it is not split.
        stream_words: Key an iterable dataset's randomness, with the epoch; None for torch's own worker
            seeding.
        base_seed: Worker i is seeded with `base_seed` + i when it starts, as torch does.
        worker_init_fn: The user's hook, called in each worker after seeding.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    drop_last: bool = False
    plan: Plan | None = None
    share: StreamShare | None = None
    stream_words: tuple[int, ...] | None = None
    base_seed: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    stacks: bool = False
    allocate: Allocate = no_memory

    @property
    def positional(self) -> bool:
        """Whether randomness is a function of position, so that the caller's generators are to be left alone."""
        return self.plan is not None or self.stream_words is not None

    def start_worker(self, worker_id: int, workers: int) -> "Worker":
        """Set this process up as a worker, as torch does: seeds, one thread, worker info, the user's hook."""
        torch.set_num_threads(1)
        seed = seed_worker(self.base_seed, worker_id)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker_id, num_workers=workers, seed=seed, dataset=self.dataset
        )
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
        return Worker(self, worker_id, alone=workers == 1)


@dataclass
class Worker:
    """Runs tasks one at a time; keeps what must outlive a task: the pass over an iterable dataset."""

    work: Work
    worker_id: int = 0
    alone: bool = True
    _stream: int = field(init=False, default=-1)
    _samples: Iterator[Any] = field(init=False, default_factory=lambda: iter(()))
    _stream_generators: Generators | None = field(init=False, default=None)
    _span: dict[PlanTask, tuple[Positions, Indices]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._gathers = self.work.stacks and self.work.batched and not is_iterable(self.work.dataset)

    def run(self, task: Task) -> Any:
        """Return the batch of a task, or `STREAM_END`; what the user's code raises gets a note and passes through."""
        if self._gathers:
            batch = self._gathered(task)
            if batch is not NOT_GATHERED:
                return batch
        match task:
            case PlanTask():
                try:
                    return self._planned(task)
                except StopIteration as error:  # a loop over the loader would take it for the end of the epoch
                    raise RuntimeError("the dataset or collate_fn raised StopIteration") from error
            case StreamTask():
                return self._streamed(task)
            case IndexTask(index):
                return self._fetch_and_collate(index)
            case range() | torch.Tensor():
                return self._fetch_and_collate(list(task) if isinstance(task, range) else task.tolist())

    def run_inline(self, task: Task) -> Any:
        """Run a task in the caller's own process, its generators untouched where randomness is by position."""
        if self._gathers:
            batch = self._gathered(task)  # which draws nothing, so there is nothing to keep apart
            if batch is not NOT_GATHERED:
                return batch
        if not self.work.positional:
            return self.run(task)
        with self._generators_apart(isinstance(task, StreamTask)):
            return self.run(task)

    def open_inline(self, stream: int, epoch: int) -> None:
        """Begin a pass over an iterable dataset in the caller's own process."""
        if self.work.positional:
            with self._generators_apart(True):
                self._open(stream, epoch)
        else:
            self._open(stream, epoch)

    def end_stream(self) -> StreamEnd:
        """Yield nothing more in this pass."""
        self._samples = iter(())
        return STREAM_END

    @contextmanager
    def _generators_apart(self, stream: bool) -> Iterator[None]:
        with callers_generators_kept():
            if self._stream_generators is not None:
                self._stream_generators.restore()
            try:
                yield
            finally:
                if stream:  # a stream goes on with its own generators where it stopped
                    self._stream_generators = Generators()

    def _gathered(self, task: Any) -> Any:
        """Return the batch of an in-memory dataset; `NOT_GATHERED` if it is none, and then it is not tried again."""
        rows: Rows | None
        kind = type(task)
        if kind is range or kind is torch.Tensor:
            rows = task
        elif kind is PlanTask:
            rows = torch.from_numpy(self._planned_rows(task)[1])
        else:
            rows = rows_of(task.index)
        batch = NOT_GATHERED if rows is None else gather(self.work.dataset, rows, self.work.allocate)
        self._gathers = batch is not NOT_GATHERED
        return batch

    def _planned_rows(self, task: PlanTask) -> tuple[Positions, Indices]:
        """Return a task's positions and indices; for a worker that is alone, evaluated along with the next tasks'."""
        plan = self.work.plan
        assert plan is not None, "a PlanTask needs a plan"
        if not self.alone:
            positions = plan.positions(*task)
            return positions, plan.indices(task.epoch, positions)
        if task not in self._span:
            span = plan.span(*task)
            self._span = {PlanTask(task.epoch, task.step + n, task.cursor): rows for n, rows in enumerate(span)}
        return self._span[task]

    def _fetch_and_collate(self, index: Any) -> Any:
        dataset = self.work.dataset
        if not self.work.batched:
            data = self._sample(index)
        elif getattr(dataset, "__getitems__", None):
            data = self._samples_in_bulk(index)
        else:
            data = [self._sample(one) for one in index]
        return self.work.collate_fn(data)

    def _sample(self, index: Any, where: str = "") -> Any:
        try:
            return self.work.dataset[index]
        except Exception as error:
            error.add_note(f"headrace: while fetching sample {index!r}{where}")
            raise

    def _samples_in_bulk(self, indices: Any, where: str = "") -> Any:
        try:
            return self.work.dataset.__getitems__(indices)
        except Exception as error:
            error.add_note(f"headrace: while fetching samples {reprlib.repr(indices)}{where}")
            raise

    def _planned(self, task: PlanTask) -> Any:
        plan = self.work.plan
        assert plan is not None, "a PlanTask needs a plan"
        positions, indices = self._planned_rows(task)
        data = self._fetch_seeded(task, plan, positions, indices)
        seed_from_words(plan.batch_seeds(task.epoch, int(positions[0])).tolist())
        return self.work.collate_fn(data if self.work.batched else data[0])

    def _fetch_seeded(self, task: PlanTask, plan: Plan, positions: Positions, indices: Indices) -> Sequence[Any]:
        """Fetch the samples, the generators seeded before each; before all where the dataset fetches in bulk."""
        seeds = plan.sample_seeds(task.epoch, positions)
        whole = indices.tolist()
        if self.work.batched and fetches_in_bulk(self.work.dataset):
            seed_from_words(seeds[0].tolist())
            fetched: Sequence[Any] = self._samples_in_bulk(whole, _place(task, int(positions[0])))
            return fetched
        samples = []
        for index, position, words in zip(whole, positions.tolist(), seeds.tolist(), strict=True):
            seed_from_words(words)
            samples.append(self._sample(index, _place(task, position)))
        return samples

    def _streamed(self, task: StreamTask) -> Any:
        if task.stream != self._stream:
            self._open(task.stream, task.epoch)
        wanted = len(task.index) if self.work.batched else 1
        data = list(islice(self._samples, wanted))
        if len(data) < wanted:
            ended = self.end_stream()  # an iterator that has ended is not asked again
            if not data or self.work.drop_last:
                return ended
        return Portion(len(data), self.work.collate_fn(data if self.work.batched else data[0]))

    def _open(self, stream: int, epoch: int) -> None:
        self._stream = stream
        self._samples = iter(())
        dataset = self.work.dataset
        if self.work.stream_words is not None:
            under = key("stream", *self.work.stream_words, epoch)
            seed_from_words(generator_seeds(under, np.array([self.worker_id]))[0].tolist())
            if callable(getattr(dataset, "set_epoch", None)):
                dataset.set_epoch(epoch)
        samples = iter(dataset)
        self._samples = samples if self.work.share is None else self.work.share.of(samples)


def _place(task: PlanTask, position: int) -> str:
    return f", position {position} of epoch {task.epoch}, step {task.step}"


def fetches_in_bulk(dataset: Any) -> bool:
    """Tell whether a dataset has a `__getitems__` that a user wrote.

    Torch's own wrappers have one that only passes on; they are looked through, so that each sample keeps its
    own randomness.
    """
    bulk = getattr(type(dataset), "__getitems__", None)
    if bulk is Subset.__getitems__:
        return fetches_in_bulk(dataset.dataset)
    if bulk is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(fetches_in_bulk(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return bool(getattr(dataset, "__getitems__", None))


def is_iterable(dataset: Any) -> bool:
    """Tell whether torch treats a dataset as iterable-style."""
    return isinstance(dataset, IterableDataset)
