"""A cheap checksum of a batch: different for different data with high probability, at microseconds a batch."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch

_LEAVES = 256
"""Of a batch with more parts than about so many, some evenly spaced ones are looked at."""

_ELEMENTS = 16
"""Of a list or dictionary that lies within another, and of many objects' own attributes, likewise."""

_BYTES = 4096
"""Of larger tensors, arrays and strings, some evenly spaced bytes are looked at."""


def checksum(batch: Any, before: int = 0) -> int:
    """Return the checksum of a batch and of all that came before it, the same in every process.

    What an object consists of that is no container, tensor, array, number or text is not looked at, but for its type.

    Args:
        batch: Anything; never changed.
        before: What this returned for the batch before.
    """
    try:
        return _of(batch, before, _LEAVES)
    except Exception:  # noqa: BLE001 - a container of the user's own may raise, which must not end the epoch
        return _of(type(batch).__qualname__, before, _LEAVES)


def _of(value: Any, before: int, most: int) -> int:
    if isinstance(value, torch.Tensor):
        return _of_array(_array_of(value), crc32(str((value.dtype, *value.shape)).encode(), before))
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return _of_array(value, crc32(str((value.dtype, value.shape)).encode(), before))
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes | bytearray):
        step = 1 + len(value) // _BYTES
        return crc32(value[::step] if step > 1 else value, crc32(b"%d" % len(value), before))
    if isinstance(value, Mapping):
        value = [part for item in value.items() for part in item]
    if isinstance(value, list | tuple | np.ndarray):
        step = 1 + (len(value) - 1) // most
        before = crc32(b"%d" % len(value), before)
        for part in value[::step]:
            before = _of(part, before, _ELEMENTS)
        return before
    if isinstance(value, int | float | complex | np.generic | None):
        return crc32(repr(value).encode(), before)
    return crc32(type(value).__qualname__.encode(), before)


def _array_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's memory as an array; an empty one where it is not to be had."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return np.empty(0)
    whole = tensor.detach().resolve_conj().resolve_neg()
    if not whole.is_contiguous():
        whole = whole[(slice(0, 1),) * (whole.dim() - 1)].contiguous() if whole.numel() > _BYTES else whole.contiguous()
    return whole.view(-1).view(torch.uint8).numpy()


def _of_array(array: Any, before: int) -> int:
    step = 1 + array.nbytes // _BYTES
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array[:1] if step > 1 else array)
    memory = array.reshape(-1).view(np.uint8)
    return crc32(memory if step == 1 else memory[::step].tobytes(), before)
