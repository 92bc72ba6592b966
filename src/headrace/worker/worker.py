"""A worker: evaluates the plan, seeds, fetches and collates, one task at a time."""

import os
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils import worker as torch_worker

from headrace.datasets.deferred import built
from headrace.datasets.told_epoch import ToldEpoch, nothing_around
from headrace.errors import note
from headrace.memory.reused import BatchMemory, reusing_collate
from headrace.plan.keys import batch_seeds, generator_seeds_at, key
from headrace.randomness import (
    COLLATION,
    Generators,
    KeyedGenerators,
    Keys,
    callers_generators_kept,
    seed_from_words,
    seed_worker,
    thread_randomness,
)
from headrace.system.torch_threads import one_torch_thread
from headrace.telemetry.stages import COLLATE, READ, StageClock
from headrace.types import IndexTask, PlanTask, Remark, Replaced, Rows, StreamStart, StreamTask, Task
from headrace.worker.fetch import Fetcher
from headrace.worker.in_memory import Unsuitable, gatherer, rows_of
from headrace.worker.seeding import Seeder
from headrace.worker.sharing import follows_epoch
from headrace.worker.steps import Steps
from headrace.worker.streams import REREAD_DIFFERS, Stream, StreamEnd
from headrace.worker.work import Work, is_iterable

_PLACES = range(2**62)
"""Sample numbers for batches without positions."""


def start_worker(work: Work, worker_id: int, workers: int, threads: int = 1) -> "Worker":
    """Set this process up as a worker, as torch does: environment, threads, seeds, worker info, the user's hook."""
    for name, value in work.environment.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    torch.set_num_threads(threads)
    seed_worker(work.base_seed, worker_id)
    torch_worker._worker_info = work.info(worker_id, workers)
    if work.worker_init_fn is not None:
        work.worker_init_fn(worker_id)
    return Worker(work, worker_id, workers)


@dataclass
class Worker:
    """Runs tasks one at a time; keeps its pass over an iterable dataset from task to task.

    Attributes:
        work: The work, fixed while the pool lives.
        worker_id: The worker's number.
        workers: How many workers share the steps.
        remarks: Remarks about the last task, its batch or the error in its place.
        clock: Measures the stages of the last task, unless the caller's thread gathered its batch.
        gathers: Whether batches are gathered whole, as far as is known.
    """

    work: Work
    worker_id: int = 0
    workers: int = 1
    remarks: list[Remark] = field(init=False, default_factory=list)
    clock: StageClock = field(init=False, default_factory=StageClock)
    _pass: int = field(init=False, default=-1)
    _stream: Stream | None = field(init=False, default=None)
    _stream_generators: Generators | None = field(init=False, default=None)
    _steps: Steps | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._begun = 0
        self._prepared = self.gathers = self._apart = False
        self._seeder = Seeder(self.work.in_threads)
        self._memory: BatchMemory | None = None
        self._told: ToldEpoch | None = None
        self._allocate, self._collate_fn = self.work.allocate, self.work.collate_fn
        if self.work.reuses:
            self._memory = memory = BatchMemory()
            self._allocate = memory.empty
            if self._collate_fn is default_collate:
                self._collate_fn = reusing_collate(memory)

    def _prepare(self) -> None:
        """Prepare the dataset at the first task, so that an error takes the place of that task's batch."""
        work = self.work
        self._dataset = dataset = built(work.dataset)
        self._told = None if work.plan is None else ToldEpoch.of(work.dataset)
        gather = gatherer(dataset) if work.stacks and work.batched and not is_iterable(dataset) else None
        if gather is not None:
            self._gather, self.gathers = gather, True
        self._fetcher = Fetcher(
            dataset,
            work.batched,
            work.keyed,
            work.fetch_threads,
            work.in_threads,
            self.remarks,
            self.clock,
            self._seeder,
            work.plan.substitutes if work.replaces and work.plan is not None else None,
        )
        self._prepared = True

    def run(self, task: Task, number: int | None = None, seeded: bool = True) -> Any:
        """Return the batch of a task, or a `StreamEnd`; exceptions of the user's code get a note and pass through.

        Args:
            task: The task.
            number: The task's number among the worker's, from 0; by default the next.
            seeded: Whether to seed the process's generators where the work is keyed. Workers that share them do not.
        """
        if not self._prepared:
            self._prepare()
        if self._told is not None:
            return self._in_epoch(task, partial(self.run, task, number, seeded), seeded)
        if self.gathers:
            self.clock.start()
            try:
                batch = self._gathered(task)
                self.clock.lap(READ)
                return batch
            except Unsuitable:
                self.gathers = False
        number = self.count() if number is None else number
        seeded = seeded and self.work.keyed
        if self.remarks:
            self.remarks.clear()  # of an attempt that was abandoned
        outer = thread_randomness.keyed
        try:
            if isinstance(task, StreamTask):
                return self._streamed(task, seeded)
            return self._seeded(task, number) if seeded else self._fetched(task, number, seeded=False)
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
            thread_randomness.keyed = outer

    def run_inline(self, task: Task, number: int | None = None) -> Any:
        """Run a task in the caller's own process, its generators untouched where the work is keyed."""
        if not self._prepared:
            self._prepare()
        if self._told is not None:
            return self._in_epoch(task, partial(self.run_inline, task, number), seeded=True)
        if self.gathers:  # no clock: it is all that the caller's `next()` does
            try:
                return self._gathered(task)  # which draws nothing, so that no generator has to be kept
            except Unsuitable:
                self.gathers = False
        if not self.work.keyed:
            return self.run(task, number)
        with self._generators_apart(isinstance(task, StreamTask)):
            self._apart = True
            return self.run(task, number)

    def _in_epoch(self, task: Any, compute: Callable[[], Any], seeded: bool) -> Any:
        """Return the batch of a plan's task, after the dataset was told the task's epoch."""
        told, self._told = self._told, None
        assert told is not None
        assert self.work.plan is not None
        around = partial(_seeded_for_epoch, self.work.plan.seed, task.epoch) if seeded else nothing_around
        try:
            return told.read(task.epoch, compute, around, partial(self._seeder.begin, replaced=True))
        finally:
            self._told = told

    def count(self) -> int:
        """Return the number of the next task, from 0."""
        number, self._begun = self._begun, self._begun + 1
        return number

    def open_inline(self, number: int, epoch: int) -> None:
        """Begin pass `number` over an iterable dataset in the caller's own process."""
        self._prepare()
        if self.work.keyed:
            with self._generators_apart(True):
                self._open(number, epoch, seeded=True)
        else:
            self._open(number, epoch, seeded=False)

    def end_stream(self) -> StreamEnd:
        """Yield nothing more in this pass."""
        return StreamEnd() if self._stream is None else self._stream.end()

    @contextmanager
    def _generators_apart(self, streamed: bool) -> Iterator[None]:
        with one_torch_thread(), callers_generators_kept():
            if self._stream_generators is not None:
                self._stream_generators.restore()
            try:
                yield
            finally:
                if streamed:  # the next batch continues with these generators
                    self._stream_generators = Generators()

    def _gathered(self, task: Any) -> Any:
        """Return the batch of an in-memory dataset.

        Raises:
            Unsuitable: The samples must be fetched one by one. Then it is not tried again.
        """
        rows: Rows | None
        kind = type(task)
        if kind is range or kind is torch.Tensor:
            rows = task
        elif kind is PlanTask:
            steps, samples = self._evaluated(task)
            rows = torch.from_numpy(steps.indices[samples])
        else:
            rows = rows_of(task.index)
        if rows is None:
            raise Unsuitable
        if self._memory is not None and not self._memory.begin():
            self._memory, self._allocate = None, self.work.allocate
        return self._gather(self._dataset, rows, self._allocate)

    def _evaluated(self, task: PlanTask) -> tuple[Steps, slice]:
        """Return evaluated steps of the plan, and which of their samples belong to a task."""
        steps = self._steps
        samples = None if steps is None else steps.samples(task)
        if steps is None or samples is None:
            plan = self.work.plan
            assert plan is not None, "a PlanTask needs a plan"
            self._steps = steps = Steps.of(plan, task, self.workers)
            samples = slice(0, steps.size)
        return steps, samples

    def _seeded(self, task: Any, number: int) -> Any:
        """Return the batch of a task whose samples have random numbers of their own."""
        seeder = self._seeder
        while True:  # at most once more for each generator
            seeder.begin(replaced=self._apart)
            try:
                batch = self._fetched(task, number, seeded=True)
            except Exception:
                if not seeder.must_repeat(failed=True):
                    raise
            else:
                if not seeder.must_repeat(failed=False):
                    return batch
                del batch
            self.remarks[:] = [one for one in self.remarks if not isinstance(one, Replaced)]  # they come again

    def _fetched(self, task: Any, number: int, seeded: bool) -> Any:
        match task:
            case PlanTask():
                return self._planned(task, seeded)
            case IndexTask(index):
                return self._sampled(index, number, seeded)
            case _:
                return self._sampled(list(task) if isinstance(task, range) else task.tolist(), number, seeded)

    def _planned(self, task: PlanTask, seeded: bool) -> Any:
        assert self.work.plan is not None
        seed = self.work.plan.seed
        steps, samples = self._evaluated(task)
        words = steps.words(samples, seed) if seeded else (None, None)
        keys = Keys(seed, task.epoch, steps.positions[samples].tolist(), *words)
        indices = steps.indices[samples].tolist()
        self.clock.start()
        data = self._fetcher.fetch(indices, keys, seeded, task.step)
        return self._collate(data, indices, keys, seeded, task)

    def _sampled(self, index: Any, number: int, seeded: bool) -> Any:
        whole = index if self.work.batched else [index]
        keys = Keys(self.work.base_seed + (0 if self.work.by_number else self.worker_id), number, _PLACES)
        self.clock.start()
        data = self._fetcher.fetch(whole, keys, seeded)
        return self._collate(data, whole, keys, seeded)

    def _collate(self, data: Any, samples: Any, keys: Keys, seeded: bool, task: PlanTask | None = None) -> Any:
        self.clock.lap(self._fetcher.stage)
        thread_randomness.keyed = KeyedGenerators(keys, COLLATION)
        converts = self.work.collate_fn is default_convert and not self.work.batched
        if seeded and not (converts and type(data[0]) is torch.Tensor):  # which draws nothing
            self._seeder.seed(keys.batch_words or batch_seeds(keys.seed, keys.epoch, keys.numbers[0]))
        try:
            batch = self._collate_fn(data if self.work.batched else data[0])
        except Exception as error:
            step = "" if task is None else f" of epoch {task.epoch}, step {task.step}"
            note(error, f"while collating samples {reprlib.repr(samples)}{step}")
            if self.work.stacks and type(data) is type(samples) is list:
                empty = [index for index, sample in zip(samples, data, strict=False) if _holds_none(sample)]
                if empty:
                    note(error, f"None cannot be collated: samples {reprlib.repr(empty)} are None, or hold it")
            raise
        self.clock.lap(COLLATE)
        return batch

    def _streamed(self, task: StreamTask, seeded: bool) -> Any:
        self.clock.start()
        if task.stream != self._pass:
            self._open(task.stream, task.epoch, seeded)
        stream, work = self._stream, self.work
        if stream is None:  # it could not begin
            return StreamEnd()

        def merge(data: list[Any]) -> Any:
            self.clock.lap(READ)
            return self._collate_fn(data if work.batched else data[0])

        wanted = len(task.index) if work.batched else 1
        while stream.again:
            stream.again -= 1
            with suppress(Exception):  # it was raised in the rank the first time
                stream.next(wanted, work.drop_last, merge)
        if stream.reread_differs():
            self.remarks.append(REREAD_DIFFERS)
        portion = stream.next(wanted, work.drop_last, merge)
        self.clock.lap(COLLATE)
        return portion

    def _open(self, number: int, epoch: int, seeded: bool) -> None:
        before, self._pass = self._pass, number
        try:
            self._begin_stream(epoch, seeded)
        except KeyboardInterrupt:
            self._pass = before  # it is opened again; after an error it is not
            raise

    def _begin_stream(self, epoch: int, seeded: bool) -> None:
        number, work = self._pass, self.work
        self._stream = None
        dataset, words = self._dataset, work.stream_words
        under = key("stream", work.base_seed, number) if words is None else key("stream", *words, epoch)
        if words is not None and seeded:
            seed_from_words(generator_seeds_at(under, self.worker_id))
        told = ToldEpoch.of(dataset) if words is not None or follows_epoch(dataset) else None
        if told is not None:
            told.read(epoch, lambda: None)
        resumes = work.starts and number == work.starts_stream
        start = work.starts[self.worker_id] if resumes else StreamStart()
        self._stream = Stream(dataset, work.share, (under.low, self.worker_id), start)


@contextmanager
def _seeded_for_epoch(seed: int, epoch: int, part: int) -> Iterator[None]:
    """Seed the generators for `set_epoch` of a part of the dataset, alike on all workers and ranks; restore them."""
    with one_torch_thread(), callers_generators_kept():
        seed_from_words(generator_seeds_at(key("set_epoch", seed, epoch), part))
        yield


def _holds_none(sample: Any) -> bool:
    parts = sample.values() if type(sample) is dict else sample if type(sample) in (list, tuple) else [sample]
    return any(part is None for part in parts)
