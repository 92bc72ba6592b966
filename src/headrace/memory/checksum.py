"""A cheap checksum of a batch: different for different data with high probability, at microseconds a batch."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch

_PARTS = 32
"""Of a longer list or dictionary about so many parts, evenly spaced, are looked at."""

_PARTS_WITHIN = 16
"""Likewise, where it is a part itself."""

_BYTES = 1024
"""Of larger tensors and arrays about so many bytes, evenly spaced, are looked at."""

_PIECE = 256
"""Of a long string so many characters at its beginning, in its middle and at its end are looked at."""

_PLAIN = {int, float, bool, str, type(None)}


def checksum(batch: Any, before: int = 0) -> int:
    """Return the checksum of a batch and of all that came before it, the same in every process.

    What an object consists of that is no container, tensor, array, number or text is not looked at, but for its type.

    Args:
        batch: Anything; never changed.
        before: What this returned for the batch before.
    """
    try:
        return _of(batch, before, _PARTS)
    except Exception:  # noqa: BLE001 - a container of the user's own may raise, which must not end the epoch
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
