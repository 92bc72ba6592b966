"""`prefetch_to_device`: the batches of any iterable, copied to a device ahead of their use."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from headrace.delivery.device.backends import backend_of, with_index
from headrace.delivery.device.choice import checked_device
from headrace.delivery.device.transfer import Transfer
from headrace.errors import bad_type, whole_number
from headrace.system.interrupts import Droppable
from headrace.system.user_warnings import warn_user

T = TypeVar("T")


class _Prefetched(Generic[T]):
    """The batches of an iterable, on a device."""

    def __init__(self, iterable: Iterable[T], device: torch.device, depth: int) -> None:
        self._iterable = iterable
        self._device = device
        self._depth = depth

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        device = with_index(self._device)
        backend = backend_of(device)
        if backend is None:
            return iter(self._iterable)
        return _Prefetcher(iter(self._iterable), Transfer(backend, device, self._depth, warn_user))


class _Prefetcher(Droppable, Iterator[Any]):
    """Copies the batches of an iterator ahead of their use. An exception comes after the batches before it."""

    def __init__(self, source: Iterator[Any], transfer: Transfer) -> None:
        self._source = source
        self._transfer = transfer
        self._staged: deque[Any] = deque()
        self._failure: Exception | None = None

    def __next__(self) -> Any:
        self._transfer.refuse_capture()
        while self._failure is None and len(self._staged) <= self._transfer.ahead:
            try:
                self._staged.append(self._transfer.start(next(self._source)))
            except Exception as error:  # noqa: BLE001 - raised in its turn; also the end, which is StopIteration
                self._failure = error
        if not self._staged:
            failure, self._failure = self._failure, None
            assert failure is not None
            try:
                raise failure  # after it the iterator is asked again, which may go on
            finally:
                del failure
        batch = self._transfer.hand_over(self._staged[0])  # if that fails, the batch comes again
        self._staged.popleft()
        return batch

    def _dropped(self) -> None:
        self._staged.clear()
        self._transfer.close()


def prefetch_to_device(iterable: Iterable[T], device: str | torch.device, depth: int = 1) -> Iterable[T]:
    """Return the batches of any iterable on a device, the next ones copied while the present one is in use.

    This is for iterables that cannot do it themselves, such as torch's own loader. `headrace.DataLoader` can, with
    `device=`. Tensors are copied from pinned memory, in batches of any structure: mappings, sequences, dataclasses,
    and objects with a method `to`. A batch is asked for `depth` batches before it is used, so a `state_dict()` of the
    iterable is ahead by so many. On the CPU the batches are the iterable's own.

    Args:
        iterable: Batches. Each `iter()` of the result is a new one of it; `len()` is its length.
        device: Where to, such as "cuda" (the current device when iteration begins) or "cuda:1".
        depth: How many batches are copied ahead of the one in use, >= 0.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: There is no such device, or `depth` is negative.

    Example:
        >>> for images, labels in prefetch_to_device(loader, "cuda"):
        ...     train(images, labels)
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        bad_type("iterable", iterable, "an iterable of batches", "Pass a loader, for example.")
    whole_number("depth", depth, fix="1 copies one batch while another is in use.")
    return _Prefetched(iterable, checked_device(device), depth)
