"""What a worker does: fetch, collate, seed; one picklable description, the same for every executor."""

import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_convert
from torch.utils.data._utils import worker as torch_worker

from headrace.datasets.deferred import Deferred, built
from headrace.errors import note
from headrace.plan.keys import Words, batch_seeds, generator_seeds_at, key, sample_words
from headrace.plan.plan import Plan
from headrace.randomness import (
    COLLATION,
    Drawing,
    Generators,
    Keys,
    callers_generators_kept,
    here,
    seed_from_words,
    seed_worker,
)
from headrace.system.torch_threads import one_torch_thread
from headrace.types import IndexTask, Indices, PlanTask, Positions, Remark, Rows, StreamStart, StreamTask, Task
from headrace.worker.fetch import Fetcher
from headrace.worker.in_memory import NOT_GATHERED, Allocate, gather, knows, no_memory, rows_of
from headrace.worker.sharing import StreamShare
from headrace.worker.streams import REREAD_DIFFERS, Stream, StreamEnd

_WORTH_IT = 256
"""Up to how many samples of all workers' batches together a worker evaluates the others' steps along with its own."""

_SEEDED_AHEAD = 256
"""Of about so many samples of them the seeds, too."""

_PLACES = range(2**62)
"""What numbers the samples of a batch that has no positions."""


@dataclass
class _Span:
    """What a plan says of some steps, evaluated together.

    Attributes:
        first: The first of them.
        size: Samples in a step; there may be fewer in the epoch's last.
        positions: Of all samples, shape (n,).
        indices: Likewise.
    """

    first: PlanTask
    size: int
    positions: Positions
    indices: Indices
    _words: Words = field(init=False, default_factory=lambda: np.empty((0, 3), np.uint64))
    _words_from: int = field(init=False, default=0)

    def samples(self, task: PlanTask) -> slice | None:
        """Return which of the samples are a task's; None if none are."""
        first = self.first
        start = (task.step - first.step) * self.size
        inside = (task.epoch, task.cursor) == (first.epoch, first.cursor) and 0 <= start < len(self.positions)
        return slice(start, start + self.size) if inside else None

    def words(self, samples: slice, seed: int) -> list[list[int]]:
        """Return what seeds the generators before each of some samples; the next ones' are worked out, too."""
        start, stop = samples.start - self._words_from, samples.stop - self._words_from
        if not 0 <= start < len(self._words):
            ahead = self.positions[samples.start : samples.start + max(1, _SEEDED_AHEAD // self.size) * self.size]
            self._words, self._words_from = sample_words(seed, self.first.epoch, ahead), samples.start
            start, stop = 0, self.size
        words: list[list[int]] = self._words[start:stop].tolist()
        return words


@dataclass
class Work:
    """Everything a worker needs to know, fixed while a pool of workers lives.

    Attributes:
        dataset: The user's dataset.
        collate_fn: Merges samples to a batch, or converts the single sample where `batched` is false.
        batched: Whether a task covers a list of samples.
        drop_last: Iterable datasets only: whether a worker's short last batch is dropped.
        plan: Works out what a `PlanTask` covers; None where a sampler decides.
        share: Splits an iterable dataset over the ranks; None where it is not split.
        stream_words: Key an iterable dataset's randomness, with the epoch; None for torch's own worker
            seeding.
        starts: Where each worker's pass over an iterable dataset begins; empty for its beginning.
        starts_stream: Which pass that is; others begin at the beginning.
        base_seed: Worker i is seeded with `base_seed` + i when it starts, as torch does.
        worker_init_fn: The user's hook, called in each worker after seeding.
        fetch_threads: How many samples of a batch a worker fetches at a time.
        stacks: Whether `collate_fn` does what torch's default collation does, so that batches of in-memory datasets
            may be gathered whole.
        allocate: Gives memory for what is gathered.
        in_threads: Whether workers share a process, so that torch's worker seeding cannot be had.
        by_number: Whether what a sampler draws is keyed by which of the pool's tasks it is, so that any worker may
            compute it; otherwise it is seeded as torch does, and hangs on the worker.
        replaces: Whether another sample takes the place of one that cannot be fetched; only with a plan.
        environment: Environment variables of the rank's that a worker process takes over; None for those to remove.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    drop_last: bool = False
    plan: Plan | None = None
    share: StreamShare | None = None
    stream_words: tuple[int, ...] | None = None
    starts: Sequence[StreamStart] = ()
    starts_stream: int = 0
    base_seed: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    fetch_threads: int = 1
    stacks: bool = False
    allocate: Allocate = no_memory
    in_threads: bool = False
    by_number: bool = False
    replaces: bool = False
    environment: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def keyed(self) -> bool:
        """Whether each batch has randomness of its own, so that the caller's generators are to be left alone."""
        return self.plan is not None or self.stream_words is not None or self.in_threads or self.by_number

    @property
    def repeatable(self) -> bool:
        """Whether its tasks can be computed again, by any worker, and yield the same bits."""
        return self.plan is not None or self.by_number

    def start_worker(self, worker_id: int, workers: int, threads: int = 1) -> "Worker":
        """Set this process up as a worker, as torch does: threads, seeds, worker info, the user's hook."""
        for name, value in self.environment.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        torch.set_num_threads(threads)
        seed_worker(self.base_seed, worker_id)
        torch_worker._worker_info = self.info(worker_id, workers)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)
        return Worker(self, worker_id, workers)

    def info(self, worker_id: int, workers: int) -> Any:
        """Return what `torch.utils.data.get_worker_info` tells in a worker."""
        kind = _DeferredInfo if isinstance(self.dataset, Deferred) else torch_worker.WorkerInfo
        return kind(id=worker_id, num_workers=workers, seed=self.base_seed + worker_id, dataset=self.dataset)


class _DeferredInfo(torch_worker.WorkerInfo):
    """Torch's worker info, whose dataset is built when it is asked for: the factory may ask for the rest."""

    @property
    def dataset(self) -> Any:
        return built(vars(self)["dataset"])

    @dataset.setter
    def dataset(self, dataset: Any) -> None:
        vars(self)["dataset"] = dataset


@dataclass
class Worker:
    """Runs tasks one at a time; keeps what must outlive a task: the pass over an iterable dataset.

    Attributes:
        work: What to do.
        worker_id: Which worker this is.
        workers: How many there are, among which steps are dealt.
        remarks: What there is to say about the task that was run last, its batch or the error in its place.
    """

    work: Work
    worker_id: int = 0
    workers: int = 1
    remarks: list[Remark] = field(init=False, default_factory=list)
    _stream: int = field(init=False, default=-1)
    _reading: Stream | None = field(init=False, default=None)
    _stream_generators: Generators | None = field(init=False, default=None)
    _span: _Span | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._begun = 0
        self._prepared = self._gathers = False

    def _prepare(self) -> None:
        """Get the dataset ready, at the first task: what goes wrong in that is an error in the place of its batch."""
        work = self.work
        self._dataset = dataset = built(work.dataset)
        self._gathers = work.stacks and work.batched and knows(dataset) and not is_iterable(dataset)
        self._fetcher = Fetcher(
            dataset,
            work.batched,
            work.keyed,
            work.fetch_threads,
            work.in_threads,
            self.remarks,
            work.plan.substitutes if work.replaces and work.plan is not None else None,
        )
        self._prepared = True

    def run(self, task: Task, number: int | None = None, seeded: bool = True) -> Any:
        """Return the batch of a task, or a `StreamEnd`; what the user's code raises gets a note and passes through.

        Args:
            task: What to compute.
            number: Which of the worker's tasks it is, from 0; by default the next.
            seeded: Whether to seed the process's generators where the work is keyed. Workers that share them do not.
        """
        if not self._prepared:
            self._prepare()
        if self._gathers:
            batch = self._gathered(task)
            if batch is not NOT_GATHERED:
                return batch
        number = self.count() if number is None else number
        seeded = seeded and self.work.keyed
        if self.remarks:
            self.remarks.clear()  # of a try that was given up
        outer = here.drawing
        try:
            match task:
                case PlanTask():
                    return self._planned(task, seeded)
                case StreamTask():
                    return self._streamed(task, seeded)
                case IndexTask(index):
                    return self._sampled(index, number, seeded)
                case _:
                    return self._sampled(list(task) if isinstance(task, range) else task.tolist(), number, seeded)
        except StopIteration as error:  # a loop over the loader takes it for the end of the epoch
            notes = getattr(error, "__notes__", ())
            if isinstance(task, PlanTask):
                told = RuntimeError("the dataset or collate_fn raised StopIteration")
                for line in notes:
                    told.add_note(line)
                raise told from error
            where = "".join(line.replace("headrace:", "", 1) for line in notes[-1:])
            self.remarks.append(
                f"the dataset or collate_fn raised StopIteration{where}, which ends the epoch there, as it does with "
                "torch's loader. Raise another exception to be told of a broken sample."
            )
            raise
        finally:
            here.drawing = outer

    def run_inline(self, task: Task, number: int | None = None) -> Any:
        """Run a task in the caller's own process, its generators untouched where the work is keyed."""
        if not self._prepared:
            self._prepare()
        if self._gathers:
            batch = self._gathered(task)  # which draws nothing, so there is nothing to keep apart
            if batch is not NOT_GATHERED:
                return batch
        if not self.work.keyed:
            return self.run(task, number)
        with self._generators_apart(isinstance(task, StreamTask)):
            return self.run(task, number)

    def count(self) -> int:
        """Return the number of the next task, from 0."""
        number, self._begun = self._begun, self._begun + 1
        return number

    def open_inline(self, stream: int, epoch: int) -> None:
        """Begin a pass over an iterable dataset in the caller's own process."""
        self._prepare()
        if self.work.keyed:
            with self._generators_apart(True):
                self._open(stream, epoch, seeded=True)
        else:
            self._open(stream, epoch, seeded=False)

    def end_stream(self) -> StreamEnd:
        """Yield nothing more in this pass."""
        return StreamEnd() if self._reading is None else self._reading.end()

    @contextmanager
    def _generators_apart(self, stream: bool) -> Iterator[None]:
        with one_torch_thread(), callers_generators_kept():
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
            span, samples = self._evaluated(task)
            rows = torch.from_numpy(span.indices[samples])
        else:
            rows = rows_of(task.index)
        batch = NOT_GATHERED if rows is None else gather(self._dataset, rows, self.work.allocate)
        self._gathers = batch is not NOT_GATHERED
        return batch

    def _evaluated(self, task: PlanTask) -> tuple[_Span, slice]:
        """Return what the plan says of a task, and which samples of that are its: where it pays, there are more."""
        plan = self.work.plan
        assert plan is not None, "a PlanTask needs a plan"
        span = self._span
        samples = None if span is None else span.samples(task)
        if span is None or samples is None:
            alone = self.workers > 1 and self.workers * plan.batch_size > _WORTH_IT
            rows = plan.span(*task, most=1) if alone else plan.span(*task)
            self._span = span = _Span(task, plan.batch_size, *rows)
            samples = slice(0, plan.batch_size)
        return span, samples

    def _planned(self, task: PlanTask, seeded: bool) -> Any:
        assert self.work.plan is not None
        seed = self.work.plan.seed
        span, samples = self._evaluated(task)
        words = span.words(samples, seed) if seeded else ()
        keys = Keys(seed, task.epoch, span.positions[samples].tolist(), words)
        indices = span.indices[samples].tolist()
        data = self._fetcher.fetch(indices, keys, seeded, task.step)
        return self._collate(data, indices, keys, seeded, task)

    def _sampled(self, index: Any, number: int, seeded: bool) -> Any:
        whole = index if self.work.batched else [index]
        keys = Keys(self.work.base_seed + (0 if self.work.by_number else self.worker_id), number, _PLACES)
        data = self._fetcher.fetch(whole, keys, seeded)
        return self._collate(data, whole, keys, seeded)

    def _collate(self, data: Any, samples: Any, keys: Keys, seeded: bool, task: PlanTask | None = None) -> Any:
        here.drawing = Drawing(keys, COLLATION)
        converts = self.work.collate_fn is default_convert and not self.work.batched
        if seeded and not (converts and type(data[0]) is torch.Tensor):  # which draws nothing
            seed_from_words(batch_seeds(keys.seed, keys.epoch, keys.numbers[0]))
        try:
            return self.work.collate_fn(data if self.work.batched else data[0])
        except Exception as error:
            step = "" if task is None else f" of epoch {task.epoch}, step {task.step}"
            note(error, f"while collating samples {reprlib.repr(samples)}{step}")
            if self.work.stacks and type(data) is type(samples) is list:
                empty = [index for index, sample in zip(samples, data, strict=False) if _holds_none(sample)]
                if empty:
                    note(error, f"None cannot be collated: samples {reprlib.repr(empty)} are None, or hold it")
            raise

    def _streamed(self, task: StreamTask, seeded: bool) -> Any:
        if task.stream != self._stream:
            self._open(task.stream, task.epoch, seeded)
        reading, work = self._reading, self.work
        if reading is None:  # it could not begin
            return StreamEnd()
        merge = work.collate_fn if work.batched else lambda data: work.collate_fn(data[0])
        wanted = len(task.index) if work.batched else 1
        while reading.again:
            reading.again -= 1
            with suppress(Exception):  # which was raised in the rank the first time
                reading.next(wanted, work.drop_last, merge)
        if reading.reread_differs():
            self.remarks.append(REREAD_DIFFERS)
        return reading.next(wanted, work.drop_last, merge)

    def _open(self, stream: int, epoch: int, seeded: bool) -> None:
        before, self._stream = self._stream, stream
        try:
            self._begin_stream(epoch, seeded)
        except KeyboardInterrupt:
            self._stream = before  # it is opened again; after an error it is not
            raise

    def _begin_stream(self, epoch: int, seeded: bool) -> None:
        stream, work = self._stream, self.work
        self._reading = None
        dataset, words = self._dataset, work.stream_words
        under = key("stream", work.base_seed, stream) if words is None else key("stream", *words, epoch)
        if words is not None:
            if seeded:
                seed_from_words(generator_seeds_at(under, self.worker_id))
            if callable(getattr(dataset, "set_epoch", None)):
                dataset.set_epoch(epoch)
        resumes = work.starts and stream == work.starts_stream
        start = work.starts[self.worker_id] if resumes else StreamStart()
        self._reading = Stream(dataset, work.share, (under.low, self.worker_id), start)


def _holds_none(sample: Any) -> bool:
    parts = sample.values() if type(sample) is dict else sample if type(sample) in (list, tuple) else [sample]
    return any(part is None for part in parts)


def is_iterable(dataset: Any) -> bool:
    """Tell whether torch treats a dataset as iterable-style."""
    return isinstance(dataset, IterableDataset)
