"""Batches as bytes: pickle protocol 5, with the data of tensors and arrays out of band."""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

Buffer = bytes | bytearray | memoryview

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes that torch cannot unpickle, and those that hold the same bits."""


class _Pickler(pickle.Pickler):
    """Lays the bytes of plain tensors out of band; torch's own pickling would copy them twice."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        if not _is_plain(value):
            signed = _SIGNED.get(value.dtype)
            return NotImplemented if signed is None else (_viewed, (value.view(signed), value.dtype))
        raw: Any = value.detach().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape), value.requires_grad)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether shape, dtype and bytes say all there is to say about a tensor."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and (tensor.is_leaf or not tensor.requires_grad)
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _tensor(raw: Buffer, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    flat = torch.frombuffer(raw, dtype=dtype) if len(raw) else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)


def _viewed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.view(dtype)


def encode(value: Any) -> list[memoryview]:
    """Pickle any value to byte views: the stream first, then the tensors' and arrays' data, uncopied.

    Raises:
        Exception: Whatever pickle raises for a value that cannot be pickled.
    """
    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]


def decode(parts: Sequence[bytearray]) -> Any:
    """Rebuild a value over its parts' memory: tensors and arrays are writable and alias `parts`."""
    return pickle.loads(parts[0], buffers=parts[1:])
