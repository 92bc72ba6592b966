"""`PackedList`: a list whose items lie in one buffer, which forked workers share."""

import copyreg
import io
import pickle
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import bad_type

T_co = TypeVar("T_co", covariant=True)


class PackedList(Sequence[T_co]):
    """A list that cannot be changed, its items pickled one after the other in one buffer.

    A forked worker that reads a Python list writes the reference count of every object that it touches. This copies the
    list's memory page by page, in each worker. Nothing writes into this buffer, so all forked workers read the same
    memory; spawned workers map it instead of copying it.

    Each read of an item makes a new object, so changes to it are lost, and an object that was in the list twice becomes
    two. A slice is a view: it copies no item, and keeps the whole buffer alive. Two PackedLists are equal only if they
    are the same object; compare `list(packed)` instead.

    Args:
        items: Picklable items; a generator is read item by item, without a list of all.

    Raises:
        Exception: Whatever pickle raises for an item that cannot be pickled, with a note that gives its number.

    Example:
        >>> paths = PackedList(f"images/{number}.jpg" for number in range(1_000_000))
        >>> paths[-1], len(paths[::10])
        ('images/999999.jpg', 100000)
    """

    __slots__ = ("_bytes", "_numbers", "_offsets")
    _bytes: memoryview
    _offsets: memoryview
    _numbers: range

    def __init__(self, items: Iterable[T_co] = ()) -> None:
        stream, offsets = io.BytesIO(), array("q", [0])
        pickler = pickle.Pickler(stream, protocol=5)
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduce_tensor}
        if not hasattr(type(items), "__iter__") and not hasattr(type(items), "__getitem__"):
            bad_type("items", items, "an iterable of samples", "Pass a list or a generator.")
        for number, item in enumerate(items):
            try:
                pickler.dump(item)
            except Exception as error:
                error.add_note(f"headrace: while packing item {number}, of type {type(item).__name__}")
                raise
            pickler.clear_memo()  # each item can be unpickled alone
            offsets.append(stream.tell())
        self._bytes = memoryview(stream.getvalue())  # which copies nothing
        self._offsets = memoryview(offsets)  # indexing it takes a third of the time of an array
        self._numbers = range(len(offsets) - 1)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> "PackedList[T_co]": ...
    def __getitem__(self, index: Any) -> Any:
        try:
            number = self._numbers[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range for a PackedList of {len(self)} items") from None
        if isinstance(number, range):
            return _over(self._bytes, self._offsets, number)
        return pickle.loads(self._bytes[self._offsets[number] : self._offsets[number + 1]])

    def __iter__(self) -> Iterator[T_co]:
        for number in self._numbers:
            yield pickle.loads(self._bytes[self._offsets[number] : self._offsets[number + 1]])

    def __repr__(self) -> str:
        return f"<PackedList of {len(self)} items>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the buffer and the offsets as arrays; for a slice, only from its lowest to its highest item."""
        numbers = self._numbers
        low, high = sorted((numbers[0], numbers[-1])) if numbers else (0, -1)
        offsets = np.asarray(self._offsets)[low : high + 2]
        items = np.asarray(self._bytes)[offsets[0] : offsets[-1]]
        rest = range(numbers.start - low, numbers.stop - low, numbers.step)
        return _from_arrays, (items, offsets - offsets[0], rest)


def _over(items: memoryview, offsets: memoryview, numbers: range) -> PackedList[Any]:
    packed: PackedList[Any] = PackedList.__new__(PackedList)
    packed._bytes, packed._offsets, packed._numbers = items, offsets, numbers
    return packed


def _from_arrays(items: NDArray[np.uint8], offsets: NDArray[np.int64], numbers: range) -> PackedList[Any]:
    return _over(items.data, offsets.data, numbers)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """Pickle a tensor as an array if nothing is lost.

    An array is read in a tenth of the time, and of a view only its elements are stored, not the whole storage.
    """
    with suppress(TypeError, RuntimeError):  # a dtype, layout or device that numpy does not have, or a gradient
        if not tensor.__dict__:
            return torch.from_numpy, (tensor.numpy(),)
    return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
