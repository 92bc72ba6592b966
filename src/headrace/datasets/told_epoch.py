"""Telling datasets the epoch, by their `set_epoch`, before the first sample of a batch of that epoch is read."""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from threading import get_ident
from typing import Any, TypeAlias, TypeVar

from torch.utils.data import Dataset

from headrace.datasets.deferred import Deferred
from headrace.datasets.fork_safety import attributes_of
from headrace.errors import note
from headrace.system.interrupts import InterruptsHeld
from headrace.system.monitor import Monitor

T = TypeVar("T")

Block: TypeAlias = Callable[[], AbstractContextManager[None]]
Around: TypeAlias = Callable[[int], AbstractContextManager[None]]

_UNKNOWN = -1

_LOOKED_AT = 64
"""A list or dictionary is searched only if one of its first so many items is a dataset."""

_CONTAINERS = (list, tuple, dict)


def told_parts(dataset: Any) -> list[Any]:
    """Return the objects that are told the epoch: the dataset if it has a `set_epoch`, else those in it that have one.

    Searched are the datasets that a dataset holds as attributes, or in lists, tuples and dictionaries that are
    attributes, as torch's wrappers do; and so on in these. A part without torch's base class counts as one if it has a
    `__getitem__`; a sampler, a loader or a transform does not. A dataset that has a `set_epoch` is not searched: it
    passes on what its parts should know. A `Deferred` counts as such a dataset, unless what it built holds none.
    """
    own = getattr(dataset, "set_epoch", None)
    if callable(own):
        return [getattr(own, "__self__", dataset)]  # a wrapper's `__getattr__` may return that of the dataset in it
    found: list[Any] = []
    waiting, seen = [dataset], {id(dataset)}
    for part in waiting:
        if isinstance(part, Deferred):
            if part.built_here is None or told_parts(part.built_here):
                found.append(part)
            continue
        for inner in _held_by(part):
            if id(inner) not in seen:
                seen.add(id(inner))
                tells = callable(getattr(type(inner), "set_epoch", None))
                (found if tells else waiting).append(inner)
    return found


def _held_by(part: Any) -> Iterator[Any]:
    """Yield the datasets that an object holds, without calling its code."""
    for held in list(attributes_of(part).values()):
        if isinstance(held, _CONTAINERS):
            yield from _contained(held)
        elif _is_dataset(held) or _like_a_dataset(held):
            yield held


def _contained(container: Any, depth: int = 2) -> Iterator[Any]:
    """Yield the datasets in a container, and in the containers in it. Most containers hold only samples."""
    items = container.values() if isinstance(container, dict) else container
    first = list(islice(items, _LOOKED_AT))
    few = len(container) <= _LOOKED_AT
    for item in items if any(map(_is_dataset, first)) else first:
        if _is_dataset(item) or (few and _like_a_dataset(item)):
            yield item
        elif depth > 1 and isinstance(item, _CONTAINERS):
            yield from _contained(item, depth - 1)


def _is_dataset(held: Any) -> bool:
    kind = type(held)
    return isinstance(held, Dataset) or (hasattr(kind, "__getitem__") and callable(getattr(kind, "set_epoch", None)))


def _like_a_dataset(held: Any) -> bool:
    return hasattr(type(held), "__getitem__") and hasattr(held, "__dict__")


class _Told:
    """What is known of an object that is told the epoch.

    Attributes:
        one: The object.
        epoch: The epoch that it was told last.
        readers: The threads that read it, once for each batch.
        changing: Whether it is being told another epoch.
    """

    __slots__ = ("__weakref__", "changing", "epoch", "one", "readers")

    def __init__(self, one: Any) -> None:
        self.one = one
        self.epoch = _UNKNOWN
        self.readers: list[int] = []
        self.changing = False

    def tell(self, epoch: int, around: Block) -> None:
        """Tell it an epoch."""
        self.epoch = _UNKNOWN  # where it raises
        if isinstance(self.one, Deferred):
            self.one.when_built(partial(_tell_built, epoch, around))
        else:
            _tell([self.one], epoch, around)
        self.epoch = epoch


def _tell_built(epoch: int, around: Block, dataset: Any) -> None:
    _tell(told_parts(dataset), epoch, around)


def _tell(parts: list[Any], epoch: int, around: Block) -> None:
    with around():
        for part in parts:
            _call(part, epoch)


def _call(part: Any, epoch: int) -> None:
    try:
        part.set_epoch(epoch)
    except StopIteration as error:  # it would look like the end of the data
        raise RuntimeError(f"set_epoch of a {type(part).__qualname__} raised StopIteration") from error
    except Exception as error:
        note(error, f"while telling a {type(part).__qualname__} that the epoch is {epoch}")
        raise


_monitor = Monitor()
_known: dict[int, weakref.ref[_Told]] = {}
"""What is known of each object that somebody reads or tells now, by the object's id."""


def _forget() -> None:
    """Forget, in a forked process, what its rank was told, and the threads that read there."""
    _monitor.__init__()  # type: ignore[misc]
    for reference in _known.values():
        told = reference()
        if told is not None:
            told.epoch, told.readers, told.changing = _UNKNOWN, [], False
    _known.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def nothing_around(number: int) -> AbstractContextManager[None]:
    """Make a block that does nothing."""
    return nullcontext()


class ToldEpoch:
    """The epoch of a dataset, as one reader sees it: others in this process may read the same objects in other epochs.

    Args:
        parts: The objects that are told.
    """

    def __init__(self, parts: list[Any]) -> None:
        with InterruptsHeld(), _monitor.mutex:
            for number in [number for number, reference in _known.items() if reference() is None]:
                del _known[number]
            self._told = [_told_of(part) for part in parts]
        self._entered = False
        self._telling: list[_Told] = []

    @classmethod
    def of(cls, dataset: Any) -> "ToldEpoch | None":
        """Return that of a dataset; None where nothing in it is told."""
        parts = told_parts(dataset)
        return cls(parts) if parts else None

    def read(
        self,
        epoch: int,
        compute: Callable[[], T],
        around: Around = nothing_around,
        then: Callable[[], None] = lambda: None,
    ) -> T:
        """Read in an epoch: wait until nobody reads in another one, tell it if it is another, and compute.

        Args:
            epoch: The epoch.
            compute: Reads, and returns what this method is to return.
            around: Makes the block around `set_epoch`, from the number of the part that is told.
            then: Called after the dataset was told.
        """
        with InterruptsHeld() as held:
            try:
                with held.allowed():
                    _monitor.wait_for(partial(self._enter, epoch))
                    if self._telling:
                        self._tell(epoch, around)
                        then()
                    return compute()
            finally:
                self._leave()

    def tell(self, epoch: int) -> None:
        """Tell the epoch now, unless others read: then those do who read in it."""
        with InterruptsHeld() as held:
            try:
                with _monitor.mutex:
                    may = self._enter(epoch, again=True)
                if may:
                    with held.allowed():
                        self._tell(epoch, nothing_around)
            finally:
                self._leave()

    def _enter(self, epoch: int, again: bool = False) -> bool:
        me = get_ident()
        for told in self._told:
            if told.changing or ((again or told.epoch != epoch) and any(one != me for one in told.readers)):
                return False
        for told in self._told:
            told.readers.append(me)
        self._entered = True
        self._telling = [told for told in self._told if again or told.epoch != epoch]
        for told in self._telling:
            told.changing = True
        return True

    def _tell(self, epoch: int, around: Around) -> None:
        for number, told in enumerate(self._told):
            if told in self._telling:
                told.tell(epoch, partial(around, number))
        self._end_telling()

    def _end_telling(self) -> None:
        with InterruptsHeld(), _monitor.mutex:
            for told in self._telling:
                told.changing = False
            self._telling = []
            _monitor.notify_all()

    def _leave(self) -> None:
        if self._entered:
            self._entered = False
            me = get_ident()
            with _monitor.mutex:
                for told in self._told:
                    if me in told.readers:  # no more in a process that was forked meanwhile
                        told.readers.remove(me)
            self._end_telling()


def _told_of(part: Any) -> _Told:
    reference = _known.get(id(part))
    told = None if reference is None else reference()
    if told is None:
        told = _Told(part)
        _known[id(part)] = weakref.ref(told)
    return told


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Tell the rank's own dataset an epoch, for a framework or a user who chose it."""
    told = ToldEpoch.of(dataset)
    if told is not None:
        told.tell(epoch)
