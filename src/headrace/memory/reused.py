"""Memory of earlier batches for new ones, in the process that uses them: without workers, and in threads.

New memory for a large batch comes from the kernel page by page, each cleared first. To collate into memory that an
earlier batch has used takes less time. Above 32 MB it takes a sixth, since malloc always returns such blocks to the
kernel.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data._utils import collate as torch_collate

from headrace.errors import SlotTooLarge
from headrace.memory.pickling import tensor_over
from headrace.memory.slots import ALIGNMENT, RECENT, BufferPool

_LEAST_BYTES = 2**22
"""Smaller tensors are left to torch. For them malloc mostly has memory that was used before. And a user who keeps the
labels of all batches should not keep the memory of the images with them."""

_SPARE = 2
"""How many unused buffers are kept."""


class BatchMemory:
    """Gives memory to the tensors of one batch after another. It is used again when the last tensor over it dies.

    A batch has one buffer, which is made for the largest of the last batches. The first batch has none.
    """

    def __init__(self) -> None:
        self._pool = BufferPool(_SPARE, private=True)
        self._sizes: deque[int] = deque(maxlen=RECENT)
        self._begun = False
        self._size = self._wanted = 0
        self._buffer: memoryview | None = None

    def begin(self) -> bool:
        """Begin a batch; return False if the batches before had no large tensors."""
        if self._begun:
            self._sizes.append(self._wanted)
        self._begun, self._wanted, self._buffer = True, 0, None
        self._size = max(self._sizes, default=0)
        return self._size > 0 or not self._sizes

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised tensor of the present batch; None where torch is to allocate it."""
        size = dtype.itemsize * math.prod(shape)
        if size < _LEAST_BYTES:
            return None
        start = -(-self._wanted // ALIGNMENT) * ALIGNMENT
        self._wanted = end = start + size
        if end > self._size:
            return None
        if self._buffer is None:
            try:
                self._buffer = self._pool.take(self._size)
            except SlotTooLarge:  # torch may find memory, or raises the error that its users know
                self._size = 0
                return None
        return tensor_over(self._buffer[start:end], dtype, shape)


def reusing_collate(memory: BatchMemory) -> Callable[[Any], Any]:
    """Return torch's default collation, whose large tensors are stacked in the memory of earlier batches."""
    by_torch = torch_collate.collate_tensor_fn

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        out = memory.empty((len(batch), *batch[0].shape), batch[0].dtype) if _stacks_plainly(batch) else None
        return by_torch(batch, collate_fn_map=collate_fn_map) if out is None else torch.stack(batch, 0, out=out)

    rules = dict(torch_collate.default_collate_fn_map)
    if rules.get(torch.Tensor) is by_torch:
        rules[torch.Tensor] = stack

    def collate(batch: Any) -> Any:
        memory.begin()
        return torch_collate.collate(batch, collate_fn_map=rules)

    return collate


def _stacks_plainly(batch: Sequence[Any]) -> bool:
    """Tell whether samples make a large tensor, without gaps, of their dtype and without gradients."""
    first = batch[0]
    if type(first) is not torch.Tensor or first.layout is not torch.strided or first.is_nested or first.is_quantized:
        return False
    if first.nbytes * len(batch) < _LEAST_BYTES:
        return False
    if not first.is_cpu or not first.is_contiguous() or {*map(type, batch)} != {torch.Tensor}:
        return False
    return all(one.dtype is first.dtype and one.shape == first.shape and not one.requires_grad for one in batch)
