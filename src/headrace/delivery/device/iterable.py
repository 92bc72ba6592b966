"""`prefetch_to_device`: the batches of any iterable, copied to a device ahead of their use."""

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch

from headrace.delivery.device.backends import backend_of, with_index
from headrace.delivery.device.choice import checked_device
from headrace.delivery.device.transfer import Copied, Transfer, Uncopied
from headrace.errors import bad_type, whole_number

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
        return iter(self._iterable) if backend is None else self._copied(Transfer(backend, device, self._depth, _warn))

    def _copied(self, transfer: Transfer) -> Iterator[T]:
        """Yield the batches. An exception of the iterable comes after the batches before it."""
        source = iter(self._iterable)
        staged: deque[Copied | Uncopied] = deque()
        failure: Exception | None = None
        try:
            while True:
                transfer.refuse_capture()
                while failure is None and len(staged) <= transfer.ahead:
                    try:
                        staged.append(transfer.start(next(source)))
                    except Exception as error:  # noqa: BLE001 - raised below; also the end, which is StopIteration
                        failure = error
                if not staged:
                    break
                yield transfer.hand_over(staged.popleft())
            if not isinstance(failure, StopIteration):
                assert failure is not None
                raise failure
        finally:
            failure = None  # its traceback refers to this frame
            staged.clear()
            transfer.close()


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def prefetch_to_device(iterable: Iterable[T], device: str | torch.device, depth: int = 1) -> Iterable[T]:
    """Return the batches of any iterable on a device, the next ones copied while the present one is in use.

    This is for iterables that cannot do it themselves, such as torch's own loader. `headrace.DataLoader` can, with
    `device=`. Tensors are copied from pinned memory, in batches of any structure: mappings, sequences, dataclasses,
    and objects with a method `to`. A batch is asked for `depth` batches before it is used, so a `state_dict()` of the
    iterable is ahead by so many. On the CPU the iterable is returned as it is.

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
