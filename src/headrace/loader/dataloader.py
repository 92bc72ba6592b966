"""`headrace.DataLoader`: torch's signature, and the wiring of plan, executor and delivery behind it."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.utils.data
from torch.utils.data import BatchSampler, Dataset, IterDataPipe, MapDataPipe, Sampler, default_collate

from headrace.delivery.pin import pinning
from headrace.delivery.reader import Delivery, Observer, PromisedLength, Reader
from headrace.executors import Executor, Pool
from headrace.loader import accelerate, agreement, options
from headrace.loader import samplers as sampling
from headrace.plan import Order, Sequential, Shuffled, Subset
from headrace.plan.state import State
from headrace.progress import PlanPass, SamplerPass, StreamPass
from headrace.progress.schedule import Schedule, draw_base_seed
from headrace.system import world
from headrace.telemetry.stats import Meter, Stats
from headrace.types import IndexTask, OnError, Tail, Task, World
from headrace.worker import in_memory as gather
from headrace.worker.work import Work, is_iterable

T_co = TypeVar("T_co", covariant=True)


class DataLoader(accelerate.Prepared, torch.utils.data.DataLoader[T_co]):
    """Torch's DataLoader, split exactly over the ranks of a distributed run.

    All of torch's arguments mean what they mean there. In one process and with none of the arguments below,
    the batches are torch's own, bit for bit. Under a process group, or with any of the arguments below, the
    loader follows a *plan*: each rank reads its share of every epoch, without `DistributedSampler`; each
    epoch is shuffled anew, without `set_epoch`; and all random augmentation is a function of (seed, epoch,
    position), so that it does not depend on the number of workers or ranks. A `sampler` or `batch_sampler` of
    your own is used as it is, and never split.

    Args:
        dataset: As torch's.
        batch_size: Samples per rank and step, as torch's; None for no batching.
        shuffle: As torch's.
        sampler: As torch's; yours alone decides, and is not split over ranks.
        batch_sampler: As torch's; likewise.
        num_workers: As torch's.
        collate_fn: As torch's.
        pin_memory: As torch's.
        drop_last: As torch's; under a plan the same as `tail="drop"`.
        timeout: As torch's, in seconds.
        worker_init_fn: As torch's.
        multiprocessing_context: As torch's.
        generator: As torch's; a plan for one rank draws its seed from it if it is given none.
        prefetch_factor: As torch's.
        persistent_workers: As torch's.
        pin_memory_device: As torch's (deprecated there).
        in_order: As torch's.
        seed: Keys shuffling and augmentation, in [0, 2^64). Default: 0 under a process group, else drawn.
        order: Another order than sequential or shuffled: `Weighted(...)`, `Balanced(...)`, `Subset(...)`.
        distributed: None splits over the world there is when iteration begins; False reads everything on
            every rank; a `World(rank, size)` is taken as given. True is None, and deals also the samples of an
            iterable dataset to the ranks, which must not split itself as well.
        tail: What happens at the end of an epoch that does not divide evenly: "pad" (the default: equal steps
            on all ranks, up to W-1 samples are read twice), "drop" (whole global batches only), or "exact"
            (every sample once; a rank may have a step less). `Plan` has a table of the three.
        executor: Where the work runs: "process" (the default if `num_workers` > 0), "thread", "inline", "ray"
            (actors of a Ray cluster, `RayExecutor`), or an `Executor`.
        fetch_threads: How many samples of a batch each worker fetches at a time, for slow storage. The order stays, and
            so do the batches; a dataset that draws from the global random generators, which threads share, is noticed
            and fetched one by one (use `headrace.rng()` there). Code that seeds a generator and puts it back within
            a sample (`torch.random.fork_rng`) is not noticed, and draws wrong numbers.
        on_error: What happens to a sample that cannot be fetched, whatever exception that is but `MemoryError`: "raise"
            passes the exception on; "replace" reads another sample of the same epoch in its place, and so makes the
            loader follow a plan. Which one is keyed by (seed, epoch, position): the same in every run, world and
            executor. If eight others fail as well, the first exception is raised. A batch that the dataset's
            `__getitems__` cannot give is fetched sample by sample, each then with random numbers of its own.
            `stats()` and the log, under "headrace", have what was replaced. Not for a `sampler` or `batch_sampler` of
            yours, nor for iterable datasets, whose samples have no positions.

    Raises:
        ValueError: An option, or a combination of options, is not allowed; the text says what is.
        TypeError: An option is of the wrong type.
        MissingExtra: The executor needs a package that is not installed.

    Example:
        >>> loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=8)
        >>> for epoch in range(90):
        ...     for images, labels in loader:
        ...         train(images, labels)
    """

    _iterator: Any  # persistent workers: torch's name for what keeps them; assigning None lets them go

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        order: Order | None = None,
        distributed: bool | World | None = None,
        tail: Tail | None = None,
        executor: Literal["process", "thread", "inline", "ray"] | Executor | None = None,
        fetch_threads: int = 1,
        on_error: OnError = "raise",
    ) -> None:
        # Kept as they were given, under their own names: frameworks rebuild loaders from such attributes.
        self.seed = seed
        self.order = order
        self.distributed = distributed
        self.tail = tail
        self.executor = executor
        self.fetch_threads = fetch_threads
        self.on_error = on_error
        with options.torchs_types(dataset, num_workers, timeout, prefetch_factor):
            super().__init__(
                dataset,
                batch_size,
                shuffle,
                sampler,
                batch_sampler,
                num_workers,
                collate_fn,
                pin_memory,
                drop_last,
                timeout,
                worker_init_fn,
                multiprocessing_context,
                generator,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                pin_memory_device=pin_memory_device,
                in_order=in_order,
            )
        self._user_order = sampler is not None or batch_sampler is not None
        # A framework that rebuilds a loader passes ours on; whatever else it passes was the first loader's.
        own_sampler = self._user_order and not isinstance(
            getattr(batch_sampler, "sampler", sampler), sampling.AutoSampler
        )
        options.check(self, own_sampler)
        self._iterable = is_iterable(dataset)
        self._meter = Meter()
        self._schedule = Schedule(
            dataset=self.dataset,
            batch_size=batch_size or 1,
            tail="drop" if drop_last else (tail or "pad"),
            tail_as_given='tail="drop"' if tail else "drop_last=True",
            distributed=distributed,
            seed=seed,
            generator=generator,
            order=None if self._user_order or self._iterable else _resolve_order(order, bool(shuffle)),
            parity=all(one is None for one in (seed, order, distributed, tail))
            and on_error == "raise"
            and options.executor_of(executor, num_workers).parity,
            sampler=type(sampler if batch_sampler is None else batch_sampler).__qualname__ if self._user_order else "",
        )
        if self._schedule.order is not None:
            # torch's __setattr__ refuses `sampler` from here on.
            self.__dict__["sampler"] = sampling.install(self._schedule, self.batch_sampler)  # type: ignore[arg-type]
        if own_sampler or not self._user_order:
            options.warn_ignored(self, shuffle, own_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` reads, from 0.

        Not needed in an ordinary run: a finished epoch is followed by the next. The epoch that comes next anyway goes
        on where a loaded state left it. It is passed on to a sampler or dataset that has the method.

        Raises:
            TypeError: `epoch` is not an integer.
            ValueError: `epoch` is negative.
        """
        self._schedule.set_epoch(epoch)
        for part in (*self._samplers(), self.dataset):
            forward = getattr(part, "set_epoch", None)
            if callable(forward):
                forward(epoch)

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` reads; it advances when an epoch is finished."""
        return self._schedule.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last batch that was handed over, for `load_state_dict` of this or another loader.

        It counts what came out of the iterator that was made last; what workers have computed ahead is not in it, and
        is computed again. After an epoch's last batch it is the beginning of the next. A few integers and strings,
        always under the same keys, that `torch.load(weights_only=True)` reads back; it costs microseconds and asks the
        workers nothing.

        Under a plan it is the same on every rank, and may be loaded with another number of ranks, workers or samples
        in a batch, another `tail` or executor. Elsewhere, and with `in_order=False`, it belongs to this rank: then
        `rank_local` holds what is needed, and other circumstances are refused when iteration begins.
        """
        if self._schedule.mode == "stream" and self._schedule.latest is None:
            self._stream_pass(options.executor_of(self.executor, self.num_workers))  # which knows what to ask
        return self._schedule.state().as_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next `iter()` go on where the loader was whose `state_dict()` this is.

        Under a plan the samples that follow are those that would have followed, augmentation included; that costs no
        more than beginning an epoch. A sampler of the user's is begun again and run to the place, without loading
        samples, unless it has a `load_state_dict` of its own. An iterable dataset, likewise, is read again, and a
        warning tells if that is not what was delivered.

        An iterator that exists already is left alone. A state of a plan puts a loader under a plan that was given no
        `seed`, and brings its seed.

        Raises:
            StateMismatch: The state is none, or was saved by a loader with another dataset length, order, seed or kind
                of sampler; the text has both values.
        """
        state = State.read(state_dict)
        self._schedule.load(state)
        if state.mode in ("parity", "sampler") and state.samples:
            warnings.warn(
                "the state of a loader without a plan brings back the order, but not the random numbers that the "
                "dataset draws. With seed= both would be exact.",
                stacklevel=2,
            )

    def _samplers(self) -> list[Any]:
        """Return the user's samplers, outermost first."""
        if not self._user_order:
            return []
        parts = (self.batch_sampler, self.sampler, getattr(self.batch_sampler, "sampler", None))
        return [part for part in parts if part is not None and not isinstance(part, sampling.AutoSampler)]

    def __repr__(self) -> str:
        return options.described(self)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_iterator": None}  # a copy has workers of its own

    def verify(self) -> None:
        """Check that all ranks are about to read the same epoch of the same data, each its own share of it.

        A collective: every rank of the default process group must call it, at the same point, e.g. once before
        training and after loading a state. It reads no sample, draws no random number and leaves the loader as it is.
        Without a group there is nobody to disagree with. Under NCCL each rank must have chosen its device before.

        Compared are the dataset's length, the seed, the order, the epoch and the place in it, the batch size, the tail,
        the number of steps and whose share each rank reads. With a sampler or an iterable dataset of your own, that of
        these which is known. Not seen are data that differ under the same length, a sampler that yields more or fewer
        batches than its `len()` says, a rank that skips steps of its own accord, and a rank that never calls this.

        Raises:
            StateMismatch: Ranks disagree, or one of them could not tell what it reads; raised on every rank, with a
                table of who has what.
        """
        agreement.verify(partial(agreement.fact_of, self))

    def stats(self) -> Stats:
        """Return what the loader has done so far: batches, samples, bytes, waiting, restarts, slots, replacements."""
        return self._meter.read()

    def __len__(self) -> int:
        """Count the batches of a whole epoch on this rank."""
        if self._schedule.planned():
            return self._schedule.shape().steps()
        if not (self._iterable and self._schedule.splits_stream()):
            return super().__len__()
        share, batch_size = self._schedule.stream_share(len(self.dataset)), self._schedule.batch_size  # type: ignore[arg-type]
        return share // batch_size if self.drop_last else -(-share // batch_size)

    def __iter__(self) -> Any:
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            return super().__iter__()
        return self._get_iterator()  # which subclasses override, to wrap what it returns

    def _get_iterator(self) -> Any:
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            return super()._get_iterator()  # deprecated in torch, and tied to its own iterators
        executor = options.executor_of(self.executor, self.num_workers)
        if executor.prefetches:
            if self.prefetch_factor is not None and self.prefetch_factor <= 0:
                raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        elif self.timeout and not self.num_workers:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        options.warn_of_ranks(self)
        persistent = self.persistent_workers and executor.prefetches
        if self._schedule.planned():
            return self._read_plan(executor, persistent)
        return (self._read_stream if self._iterable else self._read_sampler)(executor, persistent)

    def _read_plan(self, executor: Executor, persistent: bool) -> Reader:
        """Begin a pass over the plan; readers are independent of each other, and share workers that persist."""
        plan = self._schedule.plan()
        self._schedule.begin()
        reading = PlanPass(self._schedule, plan, self.in_order or not executor.prefetches)
        left = plan.samples - reading.start.samples
        link = self._link(lambda: reading.steps, 0 if plan.tail == "drop" else left % plan.global_batch)
        pool = self._iterator if persistent else None
        if not (isinstance(pool, Pool) and pool.work.plan == plan and not pool.broken):
            self._iterator = pool = None  # the old workers go before the new come
            pool = self._start(executor, plan=plan, base_seed=plan.seed % 2**63)
            if persistent:
                self._iterator = pool
        return Reader(
            pool,
            reading.tasks(),
            self._delivery(executor, link),
            partial(len, self._index_sampler),
            size=lambda task: plan.size(task.step, task.cursor),  # type: ignore[union-attr]
            meter=self._meter,
            keep_pool=persistent,
            observers=[reading] if link is None else [reading, link],
            revise=reading.revised,
            again=reading.tasks,
        )

    def _read_sampler(self, executor: Executor, persistent: bool) -> Reader:
        """Begin a pass over what a sampler draws: by torch's rules, step for step."""
        samplers = self._samplers()
        own = [self.generator, *(getattr(one, "generator", None) for one in samplers)]
        generators = list(dict.fromkeys(one for one in own if isinstance(one, torch.Generator)))
        length = partial(len, self._index_sampler)
        reading = SamplerPass(self._schedule, samplers, generators, length, self._own_sampler() is not None)
        link = self._link(lambda: len(self) - reading.behind, 0)
        observers: list[Observer] = [reading] if link is None else [reading, link]
        reader = self._iterator if persistent else None
        with reading.as_it_began():
            if isinstance(reader, Reader) and not reader.broken:
                reader.restart(reading.rest(reading.drawn(self._tasks)), observers, reading.revised)
                return reader
            # Torch asks for the sampler's iterator twice where there are workers, and some draw numbers then.
            tasks = self._tasks() if executor.prefetches else reading.drawn(self._tasks)
            pool = self._start(executor, base_seed=draw_base_seed(self.generator), by_number=executor.by_number)
            if executor.prefetches:
                tasks = reading.drawn(self._tasks)
            tasks = reading.rest(tasks)
        return self._reader(executor, pool, tasks, link, persistent, observers, reading.revised)

    def _read_stream(self, executor: Executor, persistent: bool) -> Iterator[Any]:
        """Begin a pass over what an iterable dataset yields: by torch's rules, step for step."""
        if self._schedule.keys_stream():
            self._schedule.begin()
        reading = self._stream_pass(executor)
        observers: list[Observer] = [reading]
        promised: int | None = vars(self)["_IterableDataset_len_called"]  # torch notes what len() has said
        if promised is not None:
            observers.append(PromisedLength(self.dataset, promised, processes=self.num_workers > 0))
        link = self._link(lambda: -1, self._schedule.dealing())
        ahead = None if link is None else accelerate.OneAhead(link, observers)
        observers = observers if ahead is None else [ahead.told]
        reader = self._iterator if persistent else None
        if isinstance(reader, Reader) and not reader.broken and not reading.resumed:
            if not self._schedule.keys_stream():
                reading.base_seed = reader.base_seed
            reader.restart(reading.tasks(), observers, reading.revised)
        else:
            self._iterator = reader = None  # the old workers go before the new come
            tasks = reading.tasks()
            work = self._stream_work(reading) | {"starts": reading.starts, "starts_stream": reading.stream}
            pool = self._start(executor, **work)
            if not executor.prefetches:
                pool.open_stream(reading.stream, reading.start.epoch)
            first = reading.first_worker
            reader = self._reader(executor, pool, tasks, link, persistent, observers, reading.revised, first)
        if ahead is None:
            return reader
        ahead.reader = reader
        return ahead

    def _stream_pass(self, executor: Executor) -> StreamPass:
        """Begin to count a pass over what an iterable dataset yields."""
        persistent = self.persistent_workers and executor.prefetches
        kept = isinstance(self._iterator, Reader) and not self._iterator.broken
        before = self._schedule.latest if persistent and kept else None
        workers = int(self.num_workers) if executor.prefetches else 0
        return StreamPass(self._schedule, workers, self._index_sampler, persistent, before)

    def _reader(
        self,
        executor: Executor,
        pool: Pool,
        tasks: Iterator[Task],
        link: accelerate.AccelerateLink | None,
        persistent: bool,
        observers: Sequence[Observer],
        revise: Callable[[], Iterator[Task] | None],
        first_worker: int = 0,
    ) -> Reader:
        """Make the reader of a pass without a plan."""
        reader = Reader(
            pool,
            tasks,
            self._delivery(executor, link),
            partial(len, self._index_sampler),
            size=_size if self._auto_collation else lambda task: 1,
            meter=self._meter,
            keep_pool=persistent,
            observers=observers,
            revise=revise,
            first_worker=first_worker,
        )
        if persistent:
            self._iterator = reader
        return reader

    def _own_sampler(self) -> sampling.AutoSampler | None:
        """Return the automatic sampler if no code of the user's decides on the samples; parts can be exchanged."""
        sampler, batches = self.sampler, self.batch_sampler
        alone = batches is None or (type(batches) is BatchSampler and batches.sampler is sampler)
        return sampler if isinstance(sampler, sampling.AutoSampler) and alone else None

    def _tasks(self) -> Iterator[Task]:
        sampler, batches = self._own_sampler(), self.batch_sampler
        if (
            sampler is not None
            and isinstance(batches, BatchSampler)
            and self.collate_fn is default_collate
            and gather.knows(self.dataset)
            and len(self.dataset)  # type: ignore[arg-type]
        ):
            return sampler.rows(batches.batch_size, batches.drop_last)
        return map(IndexTask, iter(self._index_sampler))

    def _stream_work(self, reading: StreamPass) -> dict[str, Any]:
        """Return what work on streams has beside the dataset: the split, and the seeds."""
        words = self._schedule.stream_words()
        if words is None:
            if reading.base_seed is None:
                reading.base_seed = draw_base_seed(self.generator)
            return {"base_seed": reading.base_seed}
        return {"share": self._schedule.dealing(), "stream_words": words, "base_seed": words[0] % 2**63}

    def _start(self, executor: Executor, **particulars: Any) -> Pool:
        if executor.prefetches:
            self.check_worker_number_rationality()
        work = Work(
            dataset=self.dataset,
            collate_fn=self.collate_fn,
            batched=self._auto_collation,
            fetch_threads=self.fetch_threads,
            replaces=self.on_error == "replace",
            stacks=self.collate_fn is default_collate,
            drop_last=self.drop_last,
            worker_init_fn=self.worker_init_fn,
            environment=world.environment(),
            **particulars,
        )
        pool = executor.start(work, int(self.num_workers), self.multiprocessing_context)
        self._meter.watch(pool)
        if self._user_order or self._iterable:
            pool.launch()  # before the user's sampler runs, as torch does: it may change what workers inherit
        return pool

    def _delivery(self, executor: Executor, link: accelerate.AccelerateLink | None) -> Delivery:
        transforms = [pinning(self.pin_memory, self.pin_memory_device), None if link is None else link.to_device]
        planned = self._schedule.planned()
        return Delivery(
            ahead=int(self.num_workers * (self.prefetch_factor or 2)) if executor.prefetches else 0,
            in_order=self.in_order,
            in_turn=self.in_order and not planned and (self._iterable or not executor.by_number),
            streams=self._iterable,
            quick_tasks=not self._user_order,
            timeout_s=self.timeout,
            transforms=tuple(one for one in transforms if one is not None),
        )

    def check_worker_number_rationality(self) -> None:
        """Warn about more workers than CPUs, as torch does, where the workers take this machine's."""
        if options.executor_of(self.executor, self.num_workers).local:
            super().check_worker_number_rationality()


def _resolve_order(order: Order | None, shuffle: bool) -> Order:
    if order is None:
        return Shuffled() if shuffle else Sequential()
    return order.shuffled() if shuffle and isinstance(order, Subset) else order


def _size(task: Task) -> int:
    """Count the samples of a batch that a sampler decided on; 0 where it yields something that cannot be counted."""
    if type(task) is range:
        return len(task)
    if type(task) is torch.Tensor:
        return task.shape[0]
    try:
        return len(task[-1])  # type: ignore[arg-type]
    except TypeError:
        return 0
