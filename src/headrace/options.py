"""What the loader's own options may be, and the errors that say so."""

import warnings
from collections.abc import Callable
from typing import Any

from torch.utils.data import MapDataPipe

from headrace import world
from headrace.errors import bad_value, whole_number
from headrace.executors import Executor, InlineExecutor, ProcessExecutor, RayExecutor, ThreadExecutor
from headrace.plan import Order
from headrace.plan.plan import MAX_SEED
from headrace.share import own_splitter
from headrace.types import ON_ERROR, TAILS, World
from headrace.work import is_iterable

EXECUTORS: dict[str, Callable[[], Executor]] = {
    "process": ProcessExecutor,
    "thread": ThreadExecutor,
    "inline": InlineExecutor,
    "ray": RayExecutor,
}


def executor_of(executor: str | Executor | None, num_workers: int) -> Executor:
    """Return the executor that the loader's arguments mean; a wrong name, torch's rule, until `check` refuses it."""
    if isinstance(executor, Executor):
        return executor
    return EXECUTORS.get(executor or "", ProcessExecutor if num_workers else InlineExecutor)()


def check(loader: Any, own_sampler: bool) -> None:
    """Refuse the options of a loader that are wrong by themselves or together.

    Args:
        loader: The loader.
        own_sampler: Whether the user passed a sampler or batch sampler.

    Raises:
        TypeError: An option is of the wrong type.
        ValueError: An option lies outside its range, or contradicts another.
    """
    if loader.seed is not None:
        whole_number("seed", loader.seed, high=MAX_SEED, fix="Any 64-bit number will do.")
    _check_order(loader.order, loader.dataset)
    if loader.distributed is not None and not isinstance(loader.distributed, bool | World):
        raise TypeError(
            f"distributed={loader.distributed!r} is not allowed: expected None, True, False or World(rank, size). "
            "Leave it out to split over the process group."
        )
    if loader.tail is not None and loader.tail not in TAILS:
        bad_value("tail", loader.tail, f"None or one of {TAILS}", 'Choose "pad" for equal steps on all ranks.')
    if loader.drop_last and loader.tail in ("pad", "exact"):
        bad_value("tail", loader.tail, 'None or "drop" together with drop_last=True', "Leave one of the two out.")
    _check_on_error(loader.on_error, loader.dataset, own_sampler)
    _check_executor(loader.executor, loader.num_workers)
    threads = whole_number("fetch_threads", loader.fetch_threads, low=1, fix="1 fetches one sample at a time.")
    if threads > 1 and (is_iterable(loader.dataset) or (loader.batch_size is None and loader.batch_sampler is None)):
        bad_value("fetch_threads", threads, "1 where samples do not come in lists of indices", "Leave it out.")


def _check_order(order: object, dataset: Any) -> None:
    if order is None:
        return
    if not isinstance(order, Order):
        raise TypeError(
            f"order={order!r} is not allowed: expected an Order such as headrace.Weighted(weights), "
            f"headrace.Balanced(labels) or headrace.Subset(indices), got {type(order).__name__}. "
            "For a plain shuffle pass shuffle=True; a torch sampler goes to sampler=."
        )
    if is_iterable(dataset):
        bad_value("order", order, "None with an IterableDataset", "It has no indices to put in order.")
    if hasattr(dataset, "__len__"):
        order.samples(len(dataset))


def _check_on_error(on_error: object, dataset: Any, own_sampler: bool) -> None:
    if on_error not in ON_ERROR:
        bad_value("on_error", on_error, f"one of {ON_ERROR}", 'Choose "raise" to stop at a broken sample.')
    if on_error == "raise":
        return
    if is_iterable(dataset) or isinstance(dataset, MapDataPipe):
        fix = "It has no positions to draw a substitute for; catch the error where it reads."
        bad_value("on_error", on_error, '"raise" with an iterable dataset or a datapipe', fix)
    if own_sampler:
        fix = "What it draws has no positions to draw a substitute for; leave the sampler out, or pass order=."
        bad_value("on_error", on_error, '"raise" with a sampler or batch_sampler of your own', fix)


def _check_executor(executor: object, num_workers: int) -> None:
    if isinstance(executor, str) and executor not in EXECUTORS:
        bad_value(
            "executor",
            executor,
            f"one of {tuple(EXECUTORS)} or an Executor",
            "Leave it out for torch's rule.",
        )
    if executor is not None and not isinstance(executor, str | Executor):
        raise TypeError(
            f"executor={executor!r} is not allowed: expected one of {tuple(EXECUTORS)} or an Executor, "
            f"got {type(executor).__name__}. Leave it out for torch's rule."
        )
    if not num_workers and executor_of(executor, num_workers).prefetches:
        bad_value("num_workers", num_workers, f"at least 1 with executor={executor!r}", 'Or use executor="inline".')


def warn_ignored(loader: Any) -> None:
    """Warn about options without effect beside the user's sampler; frameworks pass such, so it is no error."""
    ignored = [name for name in ("order", "tail", "distributed") if getattr(loader, name) not in (None, False)]
    if ignored:
        warnings.warn(
            f"{', '.join(ignored)} is ignored: the sampler or batch_sampler that was passed decides alone. "
            "Leave it out to let headrace split the epoch.",
            stacklevel=3,
        )


def warn_of_split(loader: Any) -> None:
    """Warn where the ranks read an iterable dataset as its author may not have meant; asked when iteration begins.

    What splits itself is left alone; where nobody knows, the warning says what each kind of dataset needs.
    """
    if loader.distributed not in (None, True) or loader._schedule.world().size == 1:
        return
    splitter = own_splitter(loader.dataset)
    if splitter and loader.distributed:
        warnings.warn(
            f"distributed=True deals the samples of a dataset to the ranks that {splitter} has split over them "
            "already: most of them are never read. Leave distributed= out.",
            stacklevel=6,
        )
    elif not splitter and loader.distributed is None:
        warnings.warn(
            "an IterableDataset is read as it is on every rank. If it splits itself over the ranks, as a WebDataset "
            "with nodesplitter=split_by_node does, it needs nothing: pass distributed=False to say so. If it does not, "
            "every rank reads the whole of it: pass distributed=True to deal its samples to the ranks. What splits "
            "itself must not be dealt as well, or most of it is never read.",
            stacklevel=6,
        )


def warn_of_environment(loader: Any) -> None:
    """Warn, once, where environment variables alone say that this process reads a share; asked when iteration begins.

    A process that a rank starts inherits them.
    """
    schedule = loader._schedule
    if loader._told_environment or not (schedule.planned() or schedule.splits_stream()):
        return
    if world.of_environment(loader.distributed) and schedule.world().size > 1:
        loader._told_environment = True
        rank, size = schedule.world().rank, schedule.world().size
        warnings.warn(
            f"RANK={rank} and WORLD_SIZE={size} are set and no process group is initialised, so this process reads "
            f"share {rank} of {size} of every epoch, as a rank does. If it is no rank, but was started by one and "
            "inherited them, pass distributed=False to read everything.",
            stacklevel=5,
        )
