"""`headrace.DataLoader`: torch's signature, and the wiring of plan, executor and delivery behind it."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, IterDataPipe, MapDataPipe, Sampler

from headrace.datasets.told_epoch import tell_epoch
from headrace.delivery.budget import Budget
from headrace.errors import whole_number
from headrace.executors import Executor
from headrace.loader import accelerate, agreement, last, options, readers, samplers
from headrace.plan import Order, Plan
from headrace.plan.state import State
from headrace.progress.schedule import Schedule
from headrace.progress.source import Kind, Source
from headrace.telemetry.stats import Meter, Stats
from headrace.types import OnError, Tail, World
from headrace.worker.work import is_iterable

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
        timeout: As torch's, in seconds. It also bounds what a thread (`executor="thread"`) computes alone. Batches that
            are gathered from memory in the caller's thread are not bounded; no code of the user runs there.
        worker_init_fn: As torch's.
        multiprocessing_context: As torch's.
        generator: As torch's; a plan for one rank draws its seed from it if it is given none.
        prefetch_factor: As torch's.
        persistent_workers: As torch's.
        pin_memory_device: As torch's (deprecated there).
        in_order: As torch's.
        seed: Keys shuffling and augmentation, in [0, 2^64). Default: 0 under a process group, else drawn.
        order: Another order than sequential or shuffled: `Weighted(...)`, `Balanced(...)`, `Subset(...)`,
            `LengthBucketed(...)`, which also says what a batch holds, `Blocks(...)`. With `shuffle=True` and without
            `order`, an attribute `order` of the dataset that is an `Order` is used.
        epoch_samples: The samples of an epoch, over all ranks, >= 1: epochs are then cut from an endless sequence, in
            which one epoch of the order follows another. So an epoch may be shorter or longer than the dataset, as in
            pretraining, and still no sample comes again before all others came. Default: the order's own number.
        distributed: None splits over the world there is when iteration begins; False reads everything on every rank. A
            `World(rank, size)` is taken as given. A `DeviceMesh` splits over the ranks of all its dimensions, e.g.
            `mesh["dp_replicate", "dp_shard"]`; ranks that differ in other dimensions alone, as under tensor
            parallelism, read the same. True is None, and deals also the samples of an iterable dataset to the ranks,
            which must not split itself as well.
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
        device: Where batches are put: "cuda" (the device that is current when iteration begins), "cuda:1", any
            accelerator of torch's, or "cpu", which costs nothing. The copies run beside the computation, and nothing
            waits for them but the streams that use the batch. `pin_memory` is not needed. `docs/device.md` has more.
        device_prefetch: How many batches are copied to the device ahead of the one in use, as far as workers have
            computed them, >= 0. What lies there is not in a state. Work in the caller's thread is not ahead.
        max_prefetch_bytes: How many bytes the batches may have that were asked for in advance, and the one that was
            delivered last; or a `Budget` that several loaders share. One batch is always allowed. `stats().held_back`
            tells whether the limit was reached.
        max_workers: The largest number of workers, >= `num_workers`, where these are processes and the loader follows a
            plan. It begins with `num_workers`, which is also the smallest number. There are more workers while the
            training loop waits for them, and CPUs and memory allow it; fewer where fewer would do. No batch changes.
            `stats().workers` is the present number. None leaves it at `num_workers`.

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
        epoch_samples: int | None = None,
        distributed: bool | World | DeviceMesh | None = None,
        tail: Tail | None = None,
        executor: Literal["process", "thread", "inline", "ray"] | Executor | None = None,
        fetch_threads: int = 1,
        on_error: OnError = "raise",
        device: str | torch.device | None = None,
        device_prefetch: int = 1,
        max_prefetch_bytes: int | Budget | None = None,
        max_workers: int | None = None,
    ) -> None:
        # Kept as they were given, under their own names: frameworks rebuild loaders from such attributes.
        self.seed = seed
        self.order = order
        self.epoch_samples = epoch_samples
        self.distributed = distributed
        self.tail = tail
        self.executor = executor
        self.fetch_threads = fetch_threads
        self.on_error = on_error
        self.device = device
        self.device_prefetch = device_prefetch
        self.max_prefetch_bytes = max_prefetch_bytes
        self.max_workers = max_workers
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
        sampled = sampler is not None or batch_sampler is not None
        # A framework that rebuilds a loader passes our sampler on; what else it passes was the first loader's.
        automatic = isinstance(getattr(batch_sampler, "sampler", sampler), samplers.AutoSampler)
        options.check(self, sampled and not automatic)
        kind = options.kind_of(self, sampled, bool(shuffle))
        self._meter = Meter()
        self._remarks: list[Any] = []  # warnings about the delivery, until a reader shows them
        self._transfer: Any = None
        self._pinning: Any = None
        self._share: Any = None
        resolved = None if sampled or is_iterable(dataset) else options.order_of(self, bool(shuffle))
        self._source = Source(
            kind=kind,
            dataset=self.dataset,
            batch_size=(resolved and resolved.per_rank) or batch_size or 1,
            tail="drop" if drop_last else (tail or "pad"),
            tail_argument='tail="drop"' if tail else "drop_last=True",
            distributed=distributed,
            seed=seed,
            generator=generator,
            order=resolved,
            sampler=type(sampler if batch_sampler is None else batch_sampler).__qualname__ if sampled else "",
        )
        self._schedule = Schedule(self._source)
        self._pass: Any = None  # the latest, whose state is the loader's
        self._resized: int | None = None
        self._growth: Any = None
        options.check_max_workers(self)
        if self._source.order is not None:
            # torch's __setattr__ refuses both from here on.
            both = samplers.install(self._schedule, self.batch_sampler)  # type: ignore[arg-type]
            self.__dict__["sampler"], self.__dict__["batch_sampler"] = both
        if not automatic:
            options.warn_ignored(self, shuffle, sampled)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` reads, from 0.

        Not needed in an ordinary run: a finished epoch is followed by the next. The epoch that comes next anyway goes
        on where a loaded state left it. It is passed on to a sampler that has the method, and to the dataset, or to
        the datasets in it. Under a plan that is not needed either: whoever reads a batch tells the dataset the batch's
        epoch first, whatever its `set_epoch` was called with before.

        Raises:
            TypeError: `epoch` is not an integer.
            ValueError: `epoch` is negative.
        """
        self._schedule.set_epoch(epoch)
        for part in self._samplers():
            forward = getattr(part, "set_epoch", None)
            if callable(forward):
                forward(epoch)
        tell_epoch(self.dataset, epoch)

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
        in a batch, another `tail` or executor. Without a plan, or with `in_order=False`, it belongs to this rank: its
        key `rank_local` holds what else is needed. Another rank, world size, number of workers or batch size is then
        refused when iteration begins.
        """
        if self._source.kind is Kind.STREAM and self._schedule.latest is None:
            # The pass asks the dataset for its state.
            readers.stream_pass(self, options.executor_of(self.executor, self.num_workers))
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

    def resize_workers(self, workers: int) -> None:
        """Have another number of workers from now on: those that run, and those that later epochs start.

        Not a bit of any batch changes. Where there are to be fewer, those that are too many finish what they have;
        where there are to be more, they take part as soon as they have started. `prefetch_factor` batches are asked
        for in advance for each of them. `num_workers` stays what it was, since frameworks read it. With `max_workers`
        the number goes on changing from there.

        Args:
            workers: The number of workers, >= 1; with `max_workers` from `num_workers` to that.

        Raises:
            TypeError: `workers` is not an integer.
            ValueError: It is outside of this range, or any worker cannot compute any batch: without a plan (see
                `seed=`), with threads, and where the caller's own thread computes.
        """
        low, high = (1, None) if self.max_workers is None else (int(self.num_workers), int(self.max_workers))
        fix = "Pass the number of workers." if high is None else "num_workers= and max_workers= are the limits."
        workers = whole_number("workers", workers, low=low, high=high, fix=fix)
        executor = options.executor_of(self.executor, self.num_workers)
        options.check_resizable(self, executor)
        self._resized = workers
        if self._growth is not None:
            self._growth.go_on_from(workers)
        pool = self._meter.pool
        if pool is not None and not pool.broken:
            pool.resize(workers)

    @property
    def _workers(self) -> int:
        """The number of workers to start with; `num_workers` may be set later."""
        return self._resized or int(self.num_workers)

    def _samplers(self) -> list[Any]:
        """Return the user's samplers, outermost first."""
        if not self._source.sampler:
            return []
        parts = (self.batch_sampler, self.sampler, getattr(self.batch_sampler, "sampler", None))
        return [part for part in parts if part is not None and not isinstance(part, samplers.AutoSampler)]

    def __repr__(self) -> str:
        return options.described(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has workers of its own, and all that belongs to them.
        own = ("_iterator", "_transfer", "_pinning", "_share", "_growth")
        return vars(self) | dict.fromkeys(own) | {"_remarks": []}

    def verify(self) -> None:
        """Check that all ranks are about to read the same epoch of the same data, each its own share of it.

        A collective: every rank of the default process group must call it, at the same point, e.g. once before
        training and after loading a state. It reads no sample, draws no random number and leaves the loader as it is.
        Without a group there is nobody to disagree with. Under NCCL each rank must have chosen its device before.

        Compared are the dataset's length, the seed, the order, the epoch and the place in it, the batch size, the tail,
        the number of steps and whose share each rank reads. With a sampler or an iterable dataset of your own, that of
        these which is known; and what the first steps of a sampler hold that knows of no ranks, as a copy of it tells:
        it must differ, unless `distributed=False` says that it is meant. Not seen are data that differ under the same
        length, a sampler that yields more or fewer batches than its `len()` says, a rank that skips steps of its own
        accord, and a rank that never calls this.

        Raises:
            StateMismatch: Ranks disagree, or one of them could not tell what it reads; raised on every rank, with a
                table of who has what.
        """
        agreement.verify(partial(agreement.fact_of, self))

    def plan(self) -> Plan:
        """Return the plan of this rank: which samples it reads at which step of which epoch, as a pure function.

        It is the plan for the dataset and the world as they are now, and needs no worker. A loader that was given no
        `seed` and is in no group draws its seed for it, as iterating does.

        Raises:
            ValueError: The loader follows no plan, its dataset is empty, or the order does not fit it.

        Example:
            >>> plan = loader.plan()
            >>> plan.batch(epoch=3, step=0)  # dataset indices, shape (batch_size,)
        """
        if not self._source.planned() or self._source.kind is Kind.DATAPIPE:
            raise ValueError(
                f"this loader follows no plan: {self._source.kind.reason}. A plan takes a map-style dataset and no "
                "sampler; pass seed= to get one in a single process."
            )
        return self._source.plan()

    @property
    def last_indices(self) -> NDArray[np.int64] | None:
        """The dataset indices of the batch that was handed over last, shape (samples,), in the batch's order.

        Pads count, and a sample that was replaced has the index of its substitute. None before the first batch, and
        where there are no indices: an iterable dataset, or a sampler that yields other things than whole numbers.
        """
        return last.indices(self._meter)

    @property
    def last_keys(self) -> list[str] | None:
        """The keys of these samples in their shards; None where `last_indices` is, or the dataset has no `key(index)`.

        `TarDataset` has that method.
        """
        return last.keys(self.dataset, self.last_indices)

    def stats(self) -> Stats:
        """Return what the loader has done so far: batches, samples, bytes, waiting, restarts, slots, replacements."""
        return self._meter.read()

    def __len__(self) -> int:
        """Count the batches of a whole epoch on this rank."""
        source = self._source
        if source.planned():
            return source.shape().steps(self._schedule.epoch)
        if not (source.kind is Kind.STREAM and source.splits_stream()):
            length = super().__len__()
            counted = readers.stream_batches(self, options.executor_of(self.executor, self.num_workers))
            return length if counted is None else counted
        share, batch_size = source.stream_samples(len(self.dataset)), source.batch_size  # type: ignore[arg-type]
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
        return readers.read(self, executor)

    def check_worker_number_rationality(self) -> None:
        """Warn about more workers than CPUs, as torch does, where the workers take this machine's."""
        if options.executor_of(self.executor, self.num_workers).local:
            super().check_worker_number_rationality()
