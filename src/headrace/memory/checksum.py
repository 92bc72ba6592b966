"""A fast checksum of a batch: different for different data with high probability, in microseconds."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch

_PARTS = 32
"""About how many evenly spaced items of a longer list or dictionary are hashed."""

_PARTS_WITHIN = 16
"""The same for a list or dictionary inside another."""

_BYTES = 1024
"""About how many evenly spaced bytes of a larger tensor or array are hashed."""

_PIECE = 256
"""How many characters of a long string are hashed at its start, middle and end."""

_PLAIN = {int, float, bool, str, type(None)}


def checksum(batch: Any, before: int = 0) -> int:
    """Return the checksum of a batch and of all batches before it, the same in every process.

    Containers, tensors, arrays, numbers and text are hashed by content, other objects by type.

    Args:
        batch: Any object; it is not changed.
        before: The checksum that this returned for the batch before.
    """
    try:
        return _of(batch, before, _PARTS)
    except Exception:  # noqa: BLE001 - a user's container may raise, which must not end the epoch
        return crc32(type(batch).__qualname__.encode(), before)


def _of(value: Any, before: int, most: int) -> int:
    before = crc32(type(value).__name__.encode(), before)
    if isinstance(value, torch.Tensor):
        return _of_array(_array_of(value), crc32(str((value.dtype, *value.shape)).encode(), before))
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        return _of_array(value, crc32(str((value.dtype, value.shape)).encode(), before))
    if isinstance(value, str | bytes | bytearray):
        return _of_text(value, before)
    if isinstance(value, Mapping):
        value = [part for item in value.items() for part in item]
    if isinstance(value, list | tuple | np.ndarray):
        before = crc32(b"%d" % len(value), before)
        parts = value[:: 1 + len(value) // (most + 1)]
        if {*map(type, parts)} <= _PLAIN:
            return _of_text(repr(parts), before)
        for part in parts:
            before = _of(part, before, _PARTS_WITHIN)
        return before
    if isinstance(value, int | float | complex | np.generic | None):
        return crc32(repr(value).encode(), before)
    return before


def _of_text(text: Any, before: int) -> int:
    size = len(text)
    before = crc32(b"%d" % size, before)
    starts = (0, (size - _PIECE) // 2, size - _PIECE) if size > 3 * _PIECE else ()
    for piece in [text[start : start + _PIECE] for start in starts] or [text]:
        before = crc32(piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece, before)
    return before


def _array_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's memory as an array; an empty array if it is not in plain CPU memory."""
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
