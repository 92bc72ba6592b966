"""`Deferred`: a dataset that is built in the process that reads it."""

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from headrace.errors import bad_type, bad_value, check_flag, note, whole_number
from headrace.plan import Order
from headrace.randomness import Generators, thread_randomness
from headrace.system.torch_threads import one_torch_thread


class Deferred(Dataset[Any]):
    """A dataset that is built in each process that reads it. Only its factory is sent to workers.

    For a dataset that is large when pickled, that holds threads or open files, or that reads from the worker's own
    disk. Each process builds it once, at its first read, and so does a forked process. In headrace's workers everything
    is then as if the loader had been given the built dataset, and `get_worker_info().dataset` is the built one. Torch's
    wrappers, such as `Subset`, accept it too.

    The factory must make the same samples in every process. It may call `get_worker_info()`. While it runs, torch
    computes with one thread, and afterwards the global random generators are restored. If it raises, the read raises,
    and the next read tries again. This object has none of the dataset's other attributes; `built()` returns the dataset
    of the calling process. Workers tell a dataset that has a `set_epoch` the epoch, and one that is built later is told
    when it is built.

    Args:
        factory: Makes the dataset; called without arguments. It is pickled for workers that are not forked.
        length: What `len()` returns. Without it, `len()` of a map-style dataset builds the dataset in the calling
            process. The loader calls `len()`: every rank then needs the same time, memory and files as a worker.
        iterable: Whether the factory makes an `IterableDataset`. Then this is one, and has a `len()` only if `length`
            is given.
        order: The order in which a loader with `shuffle=True` reads it, as if the dataset had an attribute `order`. The
            loader does not build the dataset to look for that attribute.

    Raises:
        TypeError: `factory` cannot be called without arguments, `length` is no integer, or `order` is no `Order`. At a
            read: the factory returned no dataset of that style.
        ValueError: `length` is negative, or an iterable dataset got an `order`. At a read: the built dataset has
            another length.

    Example:
        >>> dataset = Deferred(partial(Images, "/local/images"), length=1_281_167)
        >>> loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=8)
    """

    def __new__(
        cls,
        factory: Callable[[], Any],
        length: int | None = None,
        *,
        iterable: bool = False,
        order: Order | None = None,
    ) -> "Deferred":
        """Make a map-style or an iterable-style object: torch distinguishes them by type."""
        stream = _Stream if length is None else _StreamOfLength
        return super().__new__(stream if iterable else _Map)

    def __init__(
        self,
        factory: Callable[[], Any],
        length: int | None = None,
        *,
        iterable: bool = False,
        order: Order | None = None,
    ) -> None:
        try:
            with suppress(ValueError):  # some callables written in C have no signature
                inspect.signature(factory).bind()
        except TypeError as error:
            raise TypeError(
                f"factory={factory!r} is not allowed: expected a callable without arguments ({error}). "
                "Pass a function, a class, or functools.partial(Dataset, arguments)."
            ) from None
        check_flag("iterable", iterable, default=False)
        fix = "Leave it out to have the dataset asked."
        self.factory = factory
        self.length = None if length is None else whole_number("length", length, fix=fix)
        self.iterable = iterable
        if order is not None and not isinstance(order, Order):
            bad_type(
                "order", order, "None or an Order such as headrace.Shuffled()", "Leave it out for a plain shuffle."
            )
        if order is not None and iterable:
            bad_value("order", order, "None with iterable=True", "An iterable dataset has no indices to put in order.")
        self.order = order
        # By pid: a forked process must not use the inherited dataset, run its destructors or wait for its lock.
        self._homes: dict[int, _Home] = {}

    def built(self) -> Any:
        """Return the dataset; build it if this process has not built it yet."""
        home = self._home()
        if home.dataset is None:
            with home.lock:
                if home.building:
                    raise RuntimeError(f"the factory of {self!r} reads from the dataset that it is to build")
                if home.dataset is None:
                    home.building = True
                    try:
                        dataset = self._build()
                        if home.when_built is not None:
                            home.when_built(dataset)
                        home.dataset = dataset
                    finally:
                        home.building = False
        return home.dataset

    def _home(self) -> "_Home":
        return self._homes.get(os.getpid()) or self._homes.setdefault(os.getpid(), _Home())

    def when_built(self, call: Callable[[Any], None]) -> None:
        """Call a function with the dataset of this process: now if it is built, else once it is; only the last one."""
        home = self._home()
        with home.lock:
            home.when_built, dataset = call, home.dataset
        if dataset is not None:
            call(dataset)

    @property
    def built_here(self) -> Any:
        """The dataset, if this process has built it; else None."""
        home = self._homes.get(os.getpid())
        return None if home is None else home.dataset

    def _build(self) -> Any:
        outer, before = thread_randomness.keyed, Generators()
        try:
            thread_randomness.keyed = None  # building must not draw the random numbers of the current sample
            with one_torch_thread():
                dataset = built(self.factory())
            self._check(dataset)
        except StopIteration as error:  # it would look like the end of the data
            raise RuntimeError(f"the factory of {self!r} raised StopIteration") from error
        except Exception as error:
            note(error, f"while building the dataset of {self!r}")
            raise
        finally:
            thread_randomness.keyed = outer
            before.restore()
        return dataset

    def _check(self, dataset: Any) -> None:
        kind, streams = type(dataset), isinstance(dataset, IterableDataset)
        if self.iterable != streams or not (streams or hasattr(kind, "__getitem__") or hasattr(kind, "__getitems__")):
            expected = "an IterableDataset" if self.iterable else "a dataset with __getitem__"
            fix = "Pass iterable=True." if streams else "It must return what a DataLoader would be given."
            fix = "Leave out iterable=True." if self.iterable and hasattr(kind, "__getitem__") else fix
            raise TypeError(f"the factory returned a {kind.__name__}: expected {expected}. {fix}")
        if self.length is not None and hasattr(kind, "__len__"):
            with suppress(TypeError, NotImplementedError):  # raised by torch's datasets without a length
                own = len(dataset)
                if own != self.length:
                    raise ValueError(
                        f"length={self.length} was given, but the dataset that was built has a length of {own}. "
                        "Pass its length, and see that every process builds from the same data."
                    )

    def __repr__(self) -> str:
        made_by: Any = self.factory
        while isinstance(made_by, partial):
            made_by = made_by.func
        return f"Deferred({getattr(made_by, '__qualname__', type(made_by).__qualname__)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Deferred, iterable=self.iterable, order=self.order), (self.factory, self.length)


@dataclass(slots=True)
class _Home:
    """The state of a `Deferred` in one process.

    It has slots, so that the search before a fork does not look into it: no worker will read this dataset.
    """

    lock: Any = field(default_factory=threading.RLock)
    building: bool = False
    dataset: Any = None
    when_built: Callable[[Any], None] | None = None


class _Map(Deferred):
    def __len__(self) -> int:
        return len(self.built()) if self.length is None else self.length

    def __getitem__(self, index: Any) -> Any:
        return self.built()[index]

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]]:
        """The bulk call of the built dataset; no attribute if that has none."""
        bulk: Callable[[list[Any]], list[Any]] = self.built().__getitems__
        return bulk


class _Stream(Deferred, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(self.built())


class _StreamOfLength(_Stream):
    def __len__(self) -> int:
        assert self.length is not None
        return self.length


def built(dataset: Any) -> Any:
    """Return the dataset that a `Deferred` builds in this process; any other dataset itself."""
    return dataset.built() if isinstance(dataset, Deferred) else dataset
