"""The size of a batch."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def batch_bytes(batch: Any) -> int:
    """Count the bytes of the tensors, arrays and texts in a batch.

    What lies in objects of other types is not seen. A sparse tensor counts as if it was dense.
    """
    if isinstance(batch, torch.Tensor):
        return batch.nbytes if batch.layout is torch.strided else batch.numel() * batch.element_size()
    if isinstance(batch, str | bytes | bytearray):
        return len(batch)
    if isinstance(batch, Mapping):
        return sum(map(batch_bytes, batch.values()))
    if isinstance(batch, Sequence) and not isinstance(batch, range):
        return sum(map(batch_bytes, batch))
    if dataclasses.is_dataclass(batch):
        return sum(batch_bytes(getattr(batch, field.name, None)) for field in dataclasses.fields(batch))
    return int(batch.nbytes) if isinstance(batch, np.ndarray) else 0
