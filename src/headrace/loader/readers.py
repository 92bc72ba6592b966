"""Beginning to read: the pass, the workers and the reader for a loader's kind and executor."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, default_collate

from headrace.datasets.epoch_dependence import may_depend_on_epoch
from headrace.delivery.budget import Budget, Share
from headrace.delivery.device.backends import backend_of, with_index
from headrace.delivery.device.choice import other_local_rank
from headrace.delivery.device.transfer import Transfer
from headrace.delivery.growth import Growth
from headrace.delivery.pin import pin_function
from headrace.delivery.reader import Delivery, Reader
from headrace.delivery.window import Demand
from headrace.executors import Executor, Pool
from headrace.loader.accelerate import AccelerateLink
from headrace.loader.samplers import AutoBatches, AutoSampler
from headrace.memory.pinned import Pinning
from headrace.progress import PlanPass, SamplerPass, StreamPass
from headrace.progress.base import Pass
from headrace.progress.source import Kind, draw_base_seed
from headrace.system import world
from headrace.system.limits import rank_cpus
from headrace.types import IndexTask, Task
from headrace.worker import in_memory
from headrace.worker.seeding import worker_base_seed
from headrace.worker.sharing import batches_of_workers
from headrace.worker.work import Work


def read(loader: Any, executor: Executor) -> Reader:
    """Begin a pass over the loader's present epoch.

    Args:
        loader: The loader.
        executor: The executor that its arguments choose.
    """
    persistent = loader.persistent_workers and executor.prefetches
    if loader._source.planned():
        return _read_plan(loader, executor, persistent)
    if loader._source.kind is Kind.STREAM:
        return _read_stream(loader, executor, persistent)
    return _read_sampler(loader, executor, persistent)


def _read_plan(loader: Any, executor: Executor, persistent: bool) -> Reader:
    """Begin a pass over the plan. Readers are independent of each other, and share persistent workers."""
    _check_not_replaced(loader)
    plan = loader._source.plan()
    loader._schedule.begin()
    pool = loader._iterator if persistent else None
    if not (isinstance(pool, Pool) and pool.work.plan == plan and not pool.broken):
        loader._iterator = pool = None  # the old workers end before new ones start
        begun = worker_base_seed((plan.seed, plan.world.rank), loader.epoch)
        pool = _start(loader, executor, plan=plan, base_seed=begun)
        # Otherwise early batches would be made before workers know the epoch.
        pool.allows_early = (
            persistent and executor.copies and not may_depend_on_epoch((loader.dataset, loader.collate_fn))
        )
        if persistent:
            loader._iterator = pool
    loader._pass = reading = PlanPass(
        loader._schedule, plan, loader.in_order or not executor.prefetches, pool.allows_early
    )
    link = loader._link(reading, plan.remainder(reading.start.epoch, reading.start.samples))
    reading.observers = () if link is None else (link,)
    return _reader(loader, executor, pool, reading, link, persistent)


def _read_sampler(loader: Any, executor: Executor, persistent: bool) -> Reader:
    """Begin a pass over what a sampler draws, in the same steps as torch, which decide what its generators draw."""
    samplers = loader._samplers()
    own = [loader.generator, *(getattr(one, "generator", None) for one in samplers)]
    loader._pass = reading = SamplerPass(
        loader._schedule,
        samplers,
        generators=list(dict.fromkeys(one for one in own if isinstance(one, torch.Generator))),
        length=partial(len, loader._index_sampler),
        batched=loader._auto_collation,
        torch_alone=_automatic(loader) is not None,
    )
    link = loader._link(reading, 0)
    reading.observers = () if link is None else (link,)
    reader = loader._iterator if persistent else None
    reusable = isinstance(reader, Reader) and not reader.broken
    draw = partial(_drawn, loader)
    with reading.as_it_began():
        if reusable or not executor.prefetches:
            reading.open(draw)
        else:
            draw()  # with workers, torch asks for the iterator twice, and some samplers draw random numbers then
        if not reusable:
            seed = draw_base_seed(loader.generator)
            pool = _start(loader, executor, base_seed=seed, by_number=executor.by_number)
            if executor.prefetches:
                reading.open(draw)
        reading.skip()
    if isinstance(reader, Reader) and reusable:
        reader.restart(reading, _transfer(loader))
        return reader
    return _kept(loader, _reader(loader, executor, pool, reading, link, persistent), persistent)


def _read_stream(loader: Any, executor: Executor, persistent: bool) -> Reader:
    """Begin a pass over an iterable dataset, in the same steps as torch."""
    source = loader._source
    if source.tells_stream():
        loader._schedule.begin()
    if loader.drop_last and stream_batches(loader, executor) == 0:
        source.warn_once(
            "drop_last=True leaves no batch at all: in an epoch each worker reads fewer samples than "
            f"batch_size={loader.batch_size}, and drops them. Use fewer workers, a smaller batch_size, or "
            "drop_last=False.",
            "no batch",
        )
    reading = stream_pass(loader, executor)
    link = loader._link(reading, source.stream_share())
    reading.observers = () if link is None else (link,)
    reader = loader._iterator if persistent else None
    if isinstance(reader, Reader) and not reader.broken and not reading.resumed:
        reading.base_seed = reader.base_seed
        reading.open()
        reader.restart(reading, _transfer(loader))
        return reader
    loader._iterator = reader = None  # the old workers end before new ones start
    reading.open()
    work = _stream_work(loader, reading) | {"starts": reading.starts, "starts_stream": reading.stream}
    pool = _start(loader, executor, **work)
    if not executor.prefetches:
        pool.open_stream(reading.stream, reading.start.epoch)
    return _kept(loader, _reader(loader, executor, pool, reading, link, persistent), persistent)


def stream_batches(loader: Any, executor: Executor) -> int | None:
    """Count the batches of a stream that says how many samples each worker reads; None for others."""
    if loader.batch_size is None:
        return None
    workers = int(loader.num_workers) if executor.prefetches else 1
    return batches_of_workers(loader.dataset, workers, loader.batch_size, loader.drop_last)


def stream_pass(loader: Any, executor: Executor) -> StreamPass:
    """Make the pass over an iterable dataset that the loader is about to read."""
    persistent = loader.persistent_workers and executor.prefetches
    kept = isinstance(loader._iterator, Reader) and not loader._iterator.broken
    loader._pass = reading = StreamPass(
        loader._schedule,
        int(loader.num_workers) if executor.prefetches else 0,
        loader._index_sampler,
        length=partial(len, loader._index_sampler),
        batched=loader._auto_collation,
        persistent=persistent,
        before=loader._schedule.latest if persistent and kept else None,
        promised=vars(loader)["_IterableDataset_len_called"],  # where torch notes what len() has said
    )
    return reading


def _reader(
    loader: Any, executor: Executor, pool: Pool, reading: Pass, link: AccelerateLink | None, persistent: bool
) -> Reader:
    """Make the reader of a pass."""
    delivery, transfer = _delivery(loader, executor, link), _transfer(loader)
    _pin_slots(loader, pool, transfer)
    if delivery.demand.share is not None:
        pool.limit_slots(delivery.demand.share.most_mapped)
    return Reader(pool, reading, delivery, loader._meter, keep_pool=persistent, transfer=transfer)


def _transfer(loader: Any) -> Transfer | None:
    """Return what copies the loader's batches to its device, as it is when iteration begins; None for the CPU."""
    if loader.device is None:
        return None
    device = with_index(torch.device(loader.device))
    if loader._transfer is None or loader._transfer.device != device:
        backend = backend_of(device)
        if backend is None:
            return None
        if torch.device(loader.device).index is None and (text := other_local_rank(device)):
            loader._source.warn_once(text, "device")
        loader._transfer = Transfer(backend, device, loader.device_prefetch, loader._remarks.append)
    transfer: Transfer = loader._transfer
    return transfer


def _pin_slots(loader: Any, pool: Pool, transfer: Transfer | None) -> None:
    """Let the shared memory of batches be pinned where a `Transfer` copies them, and holds them until that has ended.

    Elsewhere the user may copy a batch, on any stream, and drop it before the copy has ended. Torch's own pinned memory
    knows of such copies; a slot would go back to its worker too early.
    """
    if transfer is None:
        return
    if loader._pinning is None and (registrar := transfer.backend.registrar()) is not None:
        loader._pinning = Pinning(registrar, loader._remarks.append)
    if loader._pinning is not None:
        pool.pin_slots(loader._pinning)


def _share(loader: Any) -> Share | None:
    """Return the loader's part of the budget that its `max_prefetch_bytes` names; None without a limit."""
    limit = loader.max_prefetch_bytes
    if loader._share is None and limit is not None:
        loader._share = (limit if isinstance(limit, Budget) else Budget(limit)).share()
    share: Share | None = loader._share
    return share


def _growth(loader: Any, executor: Executor) -> Growth | None:
    """Return what changes the loader's number of workers on the way; None if it stays."""
    if loader.max_workers is not None and loader._growth is None:
        loader._growth = Growth(
            least=int(loader.num_workers),
            most=int(loader.max_workers),
            cpus=rank_cpus() if executor.local else math.inf,
            ahead=int(loader.prefetch_factor or 2),
            workers=loader._workers,
        )
    growth: Growth | None = loader._growth
    return growth


def _kept(loader: Any, reader: Reader, persistent: bool) -> Reader:
    """Keep the reader of a pass without a plan: with persistent workers it serves later passes, too."""
    if persistent:
        loader._iterator = reader
    return reader


def _automatic(loader: Any) -> AutoSampler | None:
    """Return the automatic sampler if it alone decides on the samples: users may replace parts of a loader."""
    sampler, batches = loader.sampler, loader.batch_sampler
    alone = batches is None or (type(batches) is BatchSampler and batches.sampler is sampler)
    return sampler if isinstance(sampler, AutoSampler) and alone else None


def _check_not_replaced(loader: Any) -> None:
    """Refuse a loader under a plan whose sampler or batch sampler was replaced after it was made: nobody would read it.

    Raises:
        ValueError: It was. Subclasses do that so that workers go on from epoch to epoch.
    """
    sampler, batches = loader.sampler, loader.batch_sampler
    own = isinstance(sampler, AutoSampler)
    if own and (batches is None or (type(batches) in (BatchSampler, AutoBatches) and batches.sampler is sampler)):
        return
    name, part = ("batch_sampler", batches) if own else ("sampler", sampler)
    raise ValueError(
        f"{name}={type(part).__qualname__} was put into this {type(loader).__qualname__} after it was made, and the "
        "loader follows a plan, which does not read it. To keep workers from epoch to epoch pass "
        "persistent_workers=True to headrace.DataLoader itself; pass a sampler of your own as an argument."
    )


def _drawn(loader: Any) -> Iterator[Task]:
    """Return the tasks that the sampler draws. For in-memory data and torch's own sampler they are whole rows."""
    sampler, batches = _automatic(loader), loader.batch_sampler
    if (
        sampler is not None
        and isinstance(batches, BatchSampler)
        and loader.collate_fn is default_collate
        and in_memory.gatherer(loader.dataset)
        and len(loader.dataset)
    ):
        return sampler.rows(batches.batch_size, batches.drop_last)
    return map(IndexTask, iter(loader._index_sampler))


def _stream_work(loader: Any, reading: StreamPass) -> dict[str, Any]:
    """Return the fields of `Work` for an iterable dataset: the split over ranks, and the seeds."""
    words = loader._source.stream_words()
    if reading.base_seed is None:
        drawn = words is None
        reading.base_seed = draw_base_seed(loader.generator) if drawn else worker_base_seed(words, reading.start.epoch)
    if words is None:
        return {"base_seed": reading.base_seed}
    return {"share": loader._source.stream_share(), "stream_words": words, "base_seed": reading.base_seed}


def _start(loader: Any, executor: Executor, **particulars: Any) -> Pool:
    """Start workers."""
    if executor.prefetches:
        loader.check_worker_number_rationality()
    work = Work(
        dataset=loader.dataset,
        collate_fn=loader.collate_fn,
        batched=loader._auto_collation,
        fetch_threads=loader.fetch_threads,
        replaces=loader.on_error == "replace",
        stacks=loader.collate_fn is default_collate,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        environment=world.environment(),
        **particulars,
    )
    growth = _growth(loader, executor)
    workers = loader._workers if growth is None else growth.workers
    pool = executor.start(work, workers, loader.multiprocessing_context)
    loader._meter.watch(pool, loader._remarks.append)
    if loader._source.kind in (Kind.SAMPLER, Kind.STREAM):
        pool.launch()  # before the user's sampler runs, as torch does: it may change what workers inherit
    return pool


def _delivery(loader: Any, executor: Executor, link: AccelerateLink | None) -> Delivery:
    """Return how the batches reach the user."""
    streams = loader._source.kind is Kind.STREAM
    moves = None if link is None or loader.device is not None else link.to_device
    transforms = [pin_function(loader.pin_memory, loader.pin_memory_device), moves]
    in_turn = not loader._source.planned() and (streams or not executor.by_number)
    return Delivery(
        Demand(
            ahead=int(loader.prefetch_factor or 2) if executor.prefetches else 0,
            in_order=loader.in_order,
            in_turn=loader.in_order and in_turn,
            streams=streams,
            quick_tasks=loader._source.kind is not Kind.SAMPLER,
            timeout_s=loader.timeout,
            share=_share(loader) if executor.prefetches else None,
        ),
        transforms=tuple(one for one in transforms if one is not None),
        staged_ahead=int(streams and link is not None),  # only the next batch tells whether a stream's is the last
        remarks=loader._remarks,
        growth=_growth(loader, executor),
    )
