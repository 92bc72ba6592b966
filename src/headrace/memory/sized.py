"""The size of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def batch_bytes(batch: Any) -> int:
    """Count the bytes of the tensors, arrays and texts in a batch; what lies in objects of other types is not seen."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, str | bytes | bytearray):
        return len(batch)
    if isinstance(batch, Mapping):
        return sum(map(batch_bytes, batch.values()))
    if isinstance(batch, Sequence) and not isinstance(batch, range):
        return sum(map(batch_bytes, batch))
    size = getattr(batch, "nbytes", 0)
    return size if isinstance(size, int) else 0
