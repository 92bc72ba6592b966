"""The loader's options: allowed values, errors, warnings about options without effect; and the loader's kind."""

import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterDataPipe, MapDataPipe

from headrace.datasets.deferred import Deferred
from headrace.delivery.budget import Budget
from headrace.delivery.device.choice import checked_device
from headrace.errors import bad_type, bad_value, shown, whole_number
from headrace.executors import Executor, InlineExecutor, ProcessExecutor, RayExecutor, ThreadExecutor
from headrace.loader import unsplit
from headrace.plan import LengthBucketed, Order, Sequential, Shuffled, Subset
from headrace.plan.endless import Endless
from headrace.plan.plan import MAX_SEED
from headrace.progress.source import Kind
from headrace.system import world
from headrace.types import ON_ERROR, TAILS
from headrace.worker.sharing import own_splitter
from headrace.worker.work import is_iterable

EXECUTORS: dict[str, Callable[[], Executor]] = {
    "process": ProcessExecutor,
    "thread": ThreadExecutor,
    "inline": InlineExecutor,
    "ray": RayExecutor,
}

_OWN = (
    *("seed", "order", "epoch_samples", "distributed", "tail", "executor", "fetch_threads", "on_error"),
    *("device", "device_prefetch", "max_prefetch_bytes", "max_workers"),
)

_LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "fetch_threads": (1,),
    "on_error": ("raise",),
    "device_prefetch": (1,),
    "num_workers": (0,),
    "persistent_workers": (False,),
    "timeout": (0, 0.0),
    "in_order": (True,),
    "prefetch_factor": (None, 2),  # torch puts 2 in the place of None
}
"""The values that mean that an argument was left out, where there are others than None."""

CELLS = "the order's cells="
"""How the warning about a world that does not divide them begins."""

_SHARED_DATA = ("tp", "pp", "cp", "sp")
"""Usual names of dimensions of a mesh along which all ranks compute on the same batch."""


def executor_of(executor: str | Executor | None, num_workers: int) -> Executor:
    """Return the executor that the arguments choose; by torch's rule for a wrong name, which `check` refuses."""
    if isinstance(executor, Executor):
        return executor
    named = EXECUTORS.get(executor) if isinstance(executor, str) else None
    return (named or (ProcessExecutor if num_workers else InlineExecutor))()


def kind_of(loader: Any, sampled: bool, shuffle: bool) -> Kind:
    """Return who decides on a loader's samples.

    Args:
        loader: The loader.
        sampled: Whether it was given a sampler or batch sampler.
        shuffle: Whether it was told to shuffle.
    """
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        return Kind.DATAPIPE
    if sampled:
        return Kind.SAMPLER
    if is_iterable(loader.dataset):
        return Kind.STREAM
    chosen = (loader.seed, loader.order, loader.epoch_samples, loader.distributed, loader.tail)
    plain = all(one is None for one in chosen)
    plain = plain and loader.on_error == "raise" and executor_of(loader.executor, loader.num_workers).parity
    return Kind.PARITY if plain and not (shuffle and order_of_dataset(loader.dataset)) else Kind.PLAN


def order_of(loader: Any, shuffle: bool) -> Order:
    """Return the order of a loader without a sampler: the user's, the dataset's own, or torch's.

    Raises:
        ValueError: The dataset's own order was made for a dataset of another length, or the order has batches of its
            own and the loader a batch size, or `epoch_samples`, as well.
    """
    order: Order | None = loader.order
    if order is None and shuffle:
        order = order_of_dataset(loader.dataset)
        _check_order(order, loader.dataset)
    if order is None:
        order = Shuffled() if shuffle else Sequential()
    if shuffle and isinstance(order, Subset):
        order = order.shuffled()
    if loader.epoch_samples is not None:
        order = Endless(order, loader.epoch_samples)
    if order.per_rank is not None and loader.batch_size != 1:
        fix = "The order says what a batch holds: leave batch_size out."
        bad_value("batch_size", loader.batch_size, f"1, the default, with order={order!r}", fix)
    return order


def order_of_dataset(dataset: Any) -> Order | None:
    """Return a dataset's attribute `order` if that is an `Order`; else None."""
    order = getattr(dataset, "order", None)
    return order if isinstance(order, Order) and not is_iterable(dataset) else None


def check(loader: Any, own_sampler: bool) -> None:
    """Refuse options that are wrong by themselves or together.

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
    if loader.epoch_samples is not None:
        whole_number("epoch_samples", loader.epoch_samples, low=1, fix="Count the samples of an epoch over all ranks.")
        if is_iterable(loader.dataset):
            fix = "Its epochs end with the stream."
            bad_value("epoch_samples", loader.epoch_samples, "None with an IterableDataset", fix)
    _check_distributed(loader.distributed)
    if loader.tail is not None and not _is_one_of(loader.tail, TAILS):
        bad_value("tail", loader.tail, f"None or one of {TAILS}", 'Choose "pad" for equal steps on all ranks.')
    if loader.drop_last and loader.tail in ("pad", "exact"):
        bad_value("tail", loader.tail, 'None or "drop" together with drop_last=True', "Leave one of the two out.")
    _check_on_error(loader.on_error, loader.dataset, own_sampler)
    _check_executor(loader.executor, loader.num_workers)
    threads = whole_number("fetch_threads", loader.fetch_threads, low=1, fix="1 fetches one sample at a time.")
    if threads > 1 and (is_iterable(loader.dataset) or (loader.batch_size is None and loader.batch_sampler is None)):
        bad_value("fetch_threads", threads, "1 where samples do not come in lists of indices", "Leave it out.")

    if loader.device is not None:
        checked_device(loader.device)
    whole_number("device_prefetch", loader.device_prefetch, fix="1 copies one batch while another is in use.")
    if loader.max_prefetch_bytes is not None and not isinstance(loader.max_prefetch_bytes, Budget):
        fix = "Pass a number of bytes, or a headrace.Budget that several loaders share."
        whole_number("max_prefetch_bytes", loader.max_prefetch_bytes, low=1, fix=fix)


def _check_distributed(distributed: object) -> None:
    if not (distributed is None or isinstance(distributed, bool) or world.is_given(distributed)):
        fix = "Leave it out to split over the process group."
        bad_type("distributed", distributed, "None, True, False, World(rank, size) or a DeviceMesh", fix)
    names = (isinstance(distributed, DeviceMesh) and distributed.mesh_dim_names) or ()
    if shared := [name for name in names if name in _SHARED_DATA]:
        data = [name for name in names if name not in _SHARED_DATA]
        fix = f"Pass mesh[{', '.join(map(repr, data)) or repr('dp')}]: ranks along {shared[0]!r} need the same batches."
        bad_value("distributed", distributed, "a mesh of data-parallel dimensions alone", fix)


def _check_order(order: object, dataset: Any) -> None:
    if order is None:
        return
    if not isinstance(order, Order):
        orders = "headrace.Weighted(weights), headrace.Balanced(labels) or headrace.Subset(indices)"
        fix = "For a plain shuffle pass shuffle=True; a torch sampler goes to sampler=."
        bad_type("order", order, f"an Order such as {orders}", fix)
    if is_iterable(dataset):
        bad_value("order", order, "None with an IterableDataset", "It has no indices to put in order.")
    if hasattr(dataset, "__len__"):
        order.samples(len(dataset))


def _is_one_of(value: object, allowed: tuple[str, ...]) -> bool:
    return isinstance(value, str) and value in allowed  # an array is compared item by item


def _check_on_error(on_error: object, dataset: Any, own_sampler: bool) -> None:
    if not _is_one_of(on_error, ON_ERROR):
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
    allowed, fix = f"one of {tuple(EXECUTORS)} or an Executor", "Leave it out for torch's rule."
    if isinstance(executor, str) and executor not in EXECUTORS:
        bad_value("executor", executor, allowed, fix)
    if executor is not None and not isinstance(executor, str | Executor):
        bad_type("executor", executor, allowed, fix)
    chosen = executor_of(executor, num_workers)
    if not num_workers and chosen.prefetches:
        bad_value("num_workers", num_workers, f"at least 1 with executor={executor!r}", 'Or use executor="inline".')
    chosen.check_installed()


def check_max_workers(loader: Any) -> None:
    """Refuse a largest number of workers that is wrong by itself, or beside the other options.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is less than `num_workers`, or the number of workers may not change.
    """
    if loader.max_workers is not None:
        fix = "num_workers= is the smallest number, and max_workers= the largest."
        whole_number("max_workers", loader.max_workers, low=max(1, int(loader.num_workers)), fix=fix)
        check_resizable(loader, executor_of(loader.executor, loader.num_workers), "max_workers=")


def check_resizable(loader: Any, executor: Executor, what: str = "resize_workers") -> None:
    """Check that the number of workers may change while they run.

    Args:
        loader: The loader.
        executor: The executor that its arguments choose.
        what: What would change it.

    Raises:
        ValueError: It may not.
    """
    if not executor.resizes:
        raise ValueError(
            f"{what} is not allowed with {executor}: only local processes and Ray's workers may become more or "
            'fewer. Pass num_workers= and executor="process" or "ray".'
        )
    if not (loader._source.planned() or (executor.by_number and loader._source.kind is Kind.SAMPLER)):
        raise ValueError(
            f"{what} is not allowed: this loader follows no plan ({loader._source.kind.reason}), so the random "
            "numbers and the order of its batches depend on the number of workers. Pass seed= to get a plan."
        )


@contextmanager
def torchs_types(dataset: object, num_workers: object, timeout: object, prefetch_factor: object) -> Iterator[None]:
    """Let torch check its arguments, and explain wrong types that torch does not explain, or notices only later.

    Raises:
        TypeError: One of the arguments is of a type that torch can do nothing with.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, TypeError) or any(map(_undecided, (num_workers, timeout, prefetch_factor))):
            _check_torchs_types(dataset, num_workers, timeout, prefetch_factor)
        raise
    _check_torchs_types(dataset, num_workers, timeout, prefetch_factor)


def _check_torchs_types(dataset: object, num_workers: object, timeout: Any, prefetch_factor: object) -> None:
    if not _counts(num_workers):
        bad_type("num_workers", num_workers, "an integer >= 0", "0 loads in the calling thread.")
    try:
        bool(operator.lt(timeout, 0))
    except Exception:  # noqa: BLE001 - whatever a foreign type raises
        bad_type("timeout", timeout, "a number of seconds >= 0", "0 waits without a limit.")
    if prefetch_factor is not None and not _counts(prefetch_factor):
        bad_type("prefetch_factor", prefetch_factor, "None or an integer >= 1", "Leave it out for 2 per worker.")
    if is_iterable(dataset) or hasattr(type(dataset), "__getitem__"):
        return
    expected = "a dataset with __getitem__ and __len__ (a list will do), or an instance of IterableDataset"
    if isinstance(dataset, type):
        bad_type("dataset", dataset, expected, f"Pass an instance: {dataset.__name__}(...).")
    if hasattr(type(dataset), "__iter__"):
        fix = "Wrap it: class Stream(IterableDataset), whose __iter__ makes it anew for each epoch and worker."
        bad_type("dataset", dataset, expected, fix)
    if not hasattr(dataset, "__getitems__"):
        bad_type("dataset", dataset, expected, "Check the function that should have made it.")


def _undecided(value: object) -> bool:
    """Tell whether a value cannot say whether it is true, as an array of several items."""
    try:
        return bool(value) and False
    except Exception:  # noqa: BLE001 - whatever a foreign type raises
        return True


def _counts(value: Any) -> bool:
    """Tell whether torch can use a value as a count: an integer, a boolean, or a zero of any type."""
    try:
        operator.index(value)
    except TypeError:
        return isinstance(value, Real) and value == 0
    return True


def warn_ignored(loader: Any, shuffle: object, own_sampler: bool) -> None:
    """Warn about options that have no effect beside the others. Frameworks pass such options, so it is no error.

    Args:
        loader: The loader.
        shuffle: As it was given.
        own_sampler: Whether the user passed a sampler or batch sampler.
    """
    for text in _ignored(loader, shuffle, own_sampler):
        warnings.warn(text, stacklevel=3)


def _ignored(loader: Any, shuffle: object, own_sampler: bool) -> Iterator[str]:
    if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
        names = _given(loader, _OWN)
        if names:
            yield f"{names} is ignored: datapipes are read by torch's own iterators. Use a Dataset or IterableDataset."
        return
    if own_sampler:
        names = _given(loader, ("seed", "order", "epoch_samples", "tail", "distributed"))
        if names:
            yield (
                f"{names} is ignored: the sampler or batch_sampler that was passed decides alone. "
                "Leave it out to let headrace split the epoch."
            )
    elif loader.seed is not None and loader.generator is not None:
        yield f"generator is ignored: seed={loader.seed} keys all randomness. Leave one of the two out."
    streamed, dealt = is_iterable(loader.dataset), loader.distributed is True or world.is_given(loader.distributed)
    if streamed and loader.tail is not None and not dealt:
        yield (
            f"tail={loader.tail!r} is ignored: the samples of an IterableDataset are not dealt to the ranks unless you "
            "ask for it. Pass distributed=True, or leave tail out."
        )
    if loader.order is not None and shuffle is not None and not own_sampler:
        random = bool(loader._source.order.random)
        if random is not bool(shuffle):
            nature = "random by itself" if random else "in the same sequence every epoch"
            yield f"shuffle={shuffle!r} is ignored: order={loader.order!r} is {nature}. Leave one of the two out."
    executor = executor_of(loader.executor, loader.num_workers)
    if loader.device is None and not _left_out("device_prefetch", loader.device_prefetch):
        yield f"device_prefetch={loader.device_prefetch} is ignored: there is no device. Pass device=, or leave it out."
    if loader.max_prefetch_bytes is not None and not executor.prefetches and not loader.num_workers:
        yield (
            f"max_prefetch_bytes={shown(loader.max_prefetch_bytes)} is ignored: nothing is computed in advance without "
            "workers. Pass num_workers=, or leave it out."
        )
    names = _given(loader, executor.ignores) if loader.num_workers else ""
    if names:
        yield (
            f"{names} is ignored: executor={loader.executor!r} has no use for it. Leave it out, or choose another "
            f"executor of {tuple(EXECUTORS)}."
        )


def _given(loader: Any, names: tuple[str, ...]) -> str:
    """Return the names of those arguments that the user has given, in a line."""
    values = {name: getattr(loader, name) for name in names}
    if values.get("distributed") is False:  # every rank reads everything, which is then so
        del values["distributed"]
    return ", ".join(name for name, value in values.items() if not _left_out(name, value))


def _left_out(name: str, value: object) -> bool:
    alike = (None, *_LEFT_OUT.get(name, ()))
    return any(type(value) is type(one) and value == one for one in alike)  # an array is equal to nothing


def warn_of_ranks(loader: Any) -> None:
    """Warn, once each, where ranks may read other data than the user means; called when iteration begins."""
    source, distributed = loader._source, loader.distributed
    if isinstance(source.order, LengthBucketed) and source.order.cells % (
        at_once := source.world().size * source.batch_size
    ):
        source.warn_once(
            f"{CELLS}{source.order.cells} is no multiple of {at_once}, the batches that all ranks take at a step: "
            "every sample is still read once and within the budget, but some steps mix lengths or are small, ranks may "
            "differ by a sample at a step, and len() by epoch. "
            f"Pass LengthBucketed(..., cells={at_once}), or a multiple. That is another order, which old states do not "
            "fit: do it for a new run.",
            "cells",
        )
    if source.world().size == 1 or distributed not in (None, True):
        return
    if world.of_environment(distributed) and (source.planned() or source.splits_stream()):
        rank, size = source.world().rank, source.world().size
        source.warn_once(
            f"RANK={rank} and WORLD_SIZE={size} are set and no process group is initialised, so this process reads "
            f"share {rank} of {size} of every epoch, as a rank does. If it is no rank, but was started by one and "
            "inherited them, pass distributed=False to read everything.",
            "environment",
        )
    text = _of_stream(loader) if is_iterable(loader.dataset) else source.sampler and unsplit.warning_of(loader)
    if text:
        source.warn_once(text, "unsplit")


def _of_stream(loader: Any) -> str:
    splitter = own_splitter(loader.dataset)
    if loader.distributed:
        return splitter and (
            f"distributed=True deals the samples of a dataset to the ranks that {splitter} has split over them "
            "already: most of them are never read. Leave distributed= out."
        )
    return (not splitter) * (
        "an IterableDataset is read as it is on every rank. If it splits itself over the ranks, as a WebDataset with "
        "nodesplitter=split_by_node does, it needs nothing: pass distributed=False to say so. If it does not, every "
        "rank reads the whole of it: pass distributed=True to deal its samples to the ranks. What splits itself must "
        "not be dealt as well, or most of it is never read."
    )


def described(loader: Any) -> str:
    """Return the loader in a line: its dataset's type and length, its batch size, and the options that it was given.

    It asks a dataset for its length, but builds no `Deferred`; whatever that raises, it leaves the length out.
    """
    own = vars(loader)
    dataset: Any = own.get("dataset")
    kind, length = type(dataset).__name__, None
    if isinstance(dataset, Deferred):
        kind, length = shown(dataset), dataset.length
    else:
        with suppress(Exception):  # a line for people must not fail
            length = len(dataset)
    parts = [kind if length is None else f"{kind} of {length:,} samples"]
    for name in ("batch_size", "num_workers", *_OWN):
        if not _left_out(name, own.get(name)):
            parts.append(f"{name}={shown(own[name])}")
    return f"{type(loader).__name__}({', '.join(parts)})"
