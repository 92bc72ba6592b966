"""Values as bytes, by pickle protocol 5: the data of tensors and arrays out of band, large `bytes` without a copy."""

import functools
import pickle
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._tensor import _rebuild_from_type_v2

Buffer = bytes | bytearray | memoryview

Part = Sequence[Buffer]
"""One part of a pickled value, as consecutive pieces."""

_ARRAYS: dict[torch.dtype, np.dtype[Any]] = {
    dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}
"""Torch's types for which there are numpy types, and those."""

_SPARSE = 2
"""Tensors whose byte ranges overlap may have no element in common, as columns of a table. This is checked if the region
that they cover is larger than all of them together by this factor."""

_FEW = 32
"""The largest number of tensors in a region for which this is checked."""

_MOST_WORK = 10_000
"""How much numpy may compute, for each pair of tensors in a region, to check this (its `max_work`)."""

_MOST_PLAIN = 64
"""How many kinds of batches of plain tensors are cached, with the streams that describe them."""

_PLAIN_BYTES = 256
"""The length of the longest stream of a plain tensor, in bytes, except for very many dimensions."""


class Stream(list[Buffer]):
    """The output of a pickler: small writes joined, and each large `bytes` as the object itself, not copied."""

    write = list.append


class _AddressRange(NamedTuple):
    """The addresses of a tensor's elements, from the first to the last."""

    start: int
    end: int


class _Region:
    """Memory that several tensors are views of. It is pickled once."""

    def __init__(self, views: Sequence[torch.Tensor], start: int, end: int) -> None:
        self.start = start
        self.size = end - start
        self._views = views

    def __reduce_ex__(self, protocol: Any) -> Any:
        memory: Any = _at(self._views, self.start, (self.size,), (1,), 1)
        return memoryview, (pickle.PickleBuffer(memory),)


class _Memory:
    """Memory at an address, for numpy, and the object that keeps it alive."""

    def __init__(self, owner: Any, description: dict[str, Any]) -> None:
        self._owner = owner
        self.__array_interface__ = description


class Pickler(pickle.Pickler):
    """Pickles the bytes of tensors out of band. Torch would copy them twice, and the whole storage of each."""

    def __init__(
        self, stream: Stream, buffers: list[pickle.PickleBuffer], regions: dict[_AddressRange, _Region], shared: bool
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self.tensors: list[tuple[_AddressRange, torch.Tensor]] = []
        self._regions = regions
        self._shared = shared

    def reducer_override(self, value: Any) -> Any:
        """Reduce a tensor. The pickler calls this for each object that is not of a basic type."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if not self._shared and value.is_shared():  # type: ignore[no-untyped-call]
            raise pickle.PicklingError("a tensor in shared memory can only be inherited")
        if type(value) is not torch.Tensor:
            return _reduce_subclass(value) if _pickles_as_tensor(type(value)) else NotImplemented
        if not _is_memory(value):
            return NotImplemented
        if value.__dict__:
            return _reduce_subclass(value)
        if value.is_conj():
            return torch.conj, (value.conj(),)
        if value.is_neg():
            return torch._neg_view, (torch._neg_view(value),)
        return self._laid_out(value.detach(), value.requires_grad)

    def _laid_out(self, value: torch.Tensor, requires_grad: bool) -> Any:
        dense = value.is_contiguous()
        count = value.numel() if dense else _extent(value)
        if count:
            span = _AddressRange(value.data_ptr(), value.data_ptr() + count * value.itemsize)
            region = self._regions.get(span)
            if region is not None:
                place = (region, span.start - region.start, count)
                return _view, (*place, value.dtype, tuple(value.shape), requires_grad, value.stride())
            self.tensors.append((span, value))
        if not dense:
            value = _without_gaps(value)
            count = _extent(value)
        memory: Any
        if dense and value.dtype in _ARRAYS:
            memory = value.numpy()
        else:
            memory = value.as_strided((count,), (1,)).view(torch.uint8).numpy()
        raw, layout = pickle.PickleBuffer(memory), (value.dtype, tuple(value.shape), requires_grad)
        return (_tensor, (raw, *layout)) if dense else (_view, (raw, 0, count, *layout, value.stride()))


_plain_kinds: "dict[bytes, _Plain]" = {}
"""The first kinds of plain tensors that were rebuilt, by the streams that describe them."""

_fallback: type[Pickler] | None = None
"""The pickler for values that a `Pickler` cannot pickle."""


def pickle_with(kind: type[Pickler]) -> None:
    """Set the pickler that this process uses for values that a `Pickler` cannot pickle; it is slower."""
    global _fallback  # noqa: PLW0603 - a setting of the process
    _fallback = kind


def dump(value: Any, shared: bool = True, kind: type[Pickler] | None = None) -> list[Part]:
    """Pickle any value without copying its data: the stream first, then one part for each tensor and array.

    Tensors that are views of the same memory share memory again when rebuilt; numpy arrays do not.

    Args:
        value: The value. It must not change until its parts have been copied.
        shared: Whether tensors in shared memory may be copied like others.
        kind: The pickler; by default a `Pickler`, then the one of `pickle_with`.

    Raises:
        Exception: Whatever pickle raises for a value that cannot be pickled.
    """
    plain = _dump_plain(value) if kind is None and shared else None
    if plain is not None:
        return plain
    if kind is None and _fallback is not None:
        try:
            return dump(value, shared, Pickler)
        except Exception:  # noqa: BLE001 - the other pickler's error is raised
            kind = _fallback
    kind = kind or Pickler
    stream, buffers, pickler = _dump(kind, value, {}, shared)
    regions = _overlapping(pickler.tensors)
    if regions:  # they keep all that the first pickler made, so that no address is reused
        stream, buffers, _ = _dump(kind, value, regions, shared)
    return [stream, *([buffer.raw()] for buffer in buffers)]


def _dump_plain(value: Any) -> list[Part] | None:
    """Dump a plain tensor, or a list, tuple or dict of plain tensors, in a third of the time; None for other values."""
    container: Any = type(value)
    names: tuple[str, ...] = ()
    if container is torch.Tensor:
        tensors: Any = (value,)
    elif container is list or container is tuple:
        tensors = value
    elif container is dict and set(map(type, value)) == {str}:
        tensors, names = value.values(), tuple(value)
    else:
        return None
    if set(map(type, tensors)) != {torch.Tensor}:
        return None
    parts: list[Part] = []
    kinds, spans = [], []
    for one in tensors:
        memory = _plain_memory(one)
        if memory is None:
            return None
        parts.append([memory])
        kinds.append((one.dtype, one.shape, one.requires_grad))
        start = one.data_ptr()
        spans.append((start, start + len(memory)))
    spans.sort()
    for (_, end), (start, _) in pairwise(spans):
        if start < end:
            return None
    return [[_stream_of(container, names, tuple(kinds))], *parts]


@functools.lru_cache(maxsize=_MOST_PLAIN)
def _stream_of(
    container: Any, names: tuple[str, ...], kinds: tuple[tuple[torch.dtype, torch.Size, bool], ...]
) -> bytes:
    """Return what a `Pickler` writes for plain tensors of some `_Plain` kinds; it does not depend on the data."""
    value: Any = [_Plain(*kind) for kind in kinds]
    if container is torch.Tensor:
        (value,) = value
    else:
        value = container(zip(names, value, strict=True) if names else value)
    return pickle.dumps(value, 5, buffer_callback=list[pickle.PickleBuffer]().append)


class _Plain(NamedTuple):
    """The kind of a plain tensor: contiguous memory, and nothing else."""

    dtype: torch.dtype
    shape: torch.Size
    requires_grad: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _tensor, (pickle.PickleBuffer(bytearray()), self.dtype, tuple(self.shape), self.requires_grad)


def _dump(
    kind: type[Pickler], value: Any, regions: dict[_AddressRange, _Region], shared: bool
) -> tuple[Stream, list[pickle.PickleBuffer], Pickler]:
    stream, buffers = Stream(), list[pickle.PickleBuffer]()
    pickler = kind(stream, buffers, regions, shared)
    pickler.dump(value)
    return stream, buffers, pickler


def whole(part: Part) -> memoryview:
    """Return a part in one piece."""
    return memoryview(part[0] if len(part) == 1 else b"".join(part))


def copy_into(memory: memoryview, start: int, part: Part) -> int:
    """Copy a part into memory from `start` on; return its end."""
    for piece in part:
        memory[start : start + len(piece)] = piece
        start += len(piece)
    return start


def encode(value: Any, kind: type[Pickler] | None = None) -> list[memoryview]:
    """Pickle any value as `dump` does, to parts of one piece each.

    Raises:
        Exception: Whatever pickle raises for a value that cannot be pickled.
    """
    return [whole(part) for part in dump(value, kind=kind)]


def decode(parts: Sequence[Buffer]) -> Any:
    """Rebuild a value over its parts' memory: tensors and arrays are writable and alias `parts`."""
    if len(parts) != 2 or len(parts[0]) > _PLAIN_BYTES:
        return pickle.loads(parts[0], buffers=parts[1:])
    stream = bytes(parts[0])
    plain = _plain_kinds.get(stream)
    if plain is not None:  # in half the time
        return _tensor(parts[1], *plain)
    value = pickle.loads(stream, buffers=parts[1:])
    if len(_plain_kinds) < _MOST_PLAIN and type(value) is torch.Tensor and _is_memory(value):
        plain = _Plain(value.dtype, value.shape, value.requires_grad)
        if stream == _stream_of(torch.Tensor, (), (plain,)):
            _plain_kinds[stream] = plain
    return value


def _overlapping(tensors: Sequence[tuple[_AddressRange, torch.Tensor]]) -> dict[_AddressRange, _Region]:
    """Return the memory that tensors share, by the address range of each tensor; most batches have none."""
    clusters: list[list[tuple[_AddressRange, torch.Tensor]]] = []
    end = 0
    for span, tensor in sorted(tensors, key=lambda one: one[0]):
        if span.start >= end:
            clusters.append([])
        clusters[-1].append((span, tensor))
        end = max(end, span.end)
    regions = {}
    for cluster in clusters:
        if len(cluster) > 1:
            views = [tensor for _, tensor in cluster]
            region = _Region(views, cluster[0][0].start, max(span.end for span, _ in cluster))
            if not _only_interleaved(views, region.size):
                regions.update({span: region for span, _ in cluster})
    return regions


def _only_interleaved(tensors: Sequence[torch.Tensor], size: int) -> bool:
    """Tell whether tensors with large gaps, such as columns of a table, have no element in common."""
    if len(tensors) > _FEW or size <= _SPARSE * sum(tensor.nbytes for tensor in tensors):
        return False
    views = [
        _at(one, one.data_ptr(), tuple(one.shape), tuple(step * one.itemsize for step in one.stride()), one.itemsize)
        for one in tensors
    ]
    try:
        return not any(np.shares_memory(*pair, max_work=_MOST_WORK) for pair in combinations(views, 2))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


def _at(
    owner: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int
) -> np.ndarray[Any, Any]:
    """Return memory at an address as an array of uninterpreted items."""
    kind = "|u1" if item_bytes == 1 else f"|V{item_bytes}"
    description = {"data": (address, False), "shape": shape, "strides": strides, "typestr": kind, "version": 3}
    return np.asarray(_Memory(owner, description))


def _is_memory(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is strided memory of this process, and nothing else."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor._is_zerotensor()
    )


def _plain_memory(tensor: torch.Tensor) -> memoryview | None:
    """Return the memory of a plain contiguous tensor with a numpy type; None for any other tensor."""
    if tensor.__dict__:
        return None
    try:
        array: Any = (tensor.detach() if tensor.requires_grad else tensor).numpy()
    except (TypeError, RuntimeError):  # on a device, sparse, nested, quantized, conjugate, ...
        return None
    return pickle.PickleBuffer(array).raw() if array.size and array.flags.c_contiguous else None


def _pickles_as_tensor(kind: type[torch.Tensor]) -> bool:
    """Tell whether a subclass inherits pickling and dispatch from torch.Tensor."""
    return (
        kind.__reduce_ex__ is torch.Tensor.__reduce_ex__
        and kind.__reduce__ is torch.Tensor.__reduce__
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _reduce_subclass(value: torch.Tensor) -> Any:
    """Reduce a tensor of a subclass, or with attributes, to a plain tensor, its type and its attributes."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = value.as_subclass(torch.Tensor)
    return _rebuild_from_type_v2, (_identity, type(value), (plain,), torch._utils._get_obj_state(value))  # type: ignore[no-untyped-call]


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of element places from a tensor's first element to its last."""
    return 1 + sum(step * (length - 1) for step, length in zip(tensor.stride(), tensor.shape, strict=True))


def _without_gaps(value: torch.Tensor) -> torch.Tensor:
    """Return a copy without gaps between its elements; the tensor itself if it has no gaps or its elements overlap."""
    core = value[tuple(slice(1) if step == 0 else slice(None) for step in value.stride())]
    reach = 0
    for step, length in sorted(zip(core.stride(), core.shape, strict=True)):
        if length > 1 and step <= reach:
            return value
        reach += step * (length - 1)
    return value if reach < core.numel() else core.clone().expand(value.shape)


def tensor_over(raw: Buffer, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a contiguous tensor over memory of its size, which is not empty."""
    if dtype in _ARRAYS:  # in half the time, and the tensor is no view of another
        return torch.from_numpy(np.ndarray(shape, _ARRAYS[dtype], raw))
    return torch.frombuffer(raw, dtype=dtype).reshape(tuple(shape))


def _tensor(raw: Buffer, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    tensor = tensor_over(raw, dtype, shape) if len(raw) else torch.empty(shape, dtype=dtype, device="cpu")
    return tensor.requires_grad_() if requires_grad else tensor


def _view(
    raw: Buffer,
    start: int,
    count: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool,
    stride: tuple[int, ...],
) -> torch.Tensor:
    flat = torch.frombuffer(raw, dtype=dtype, offset=start, count=count)
    return flat.as_strided(shape, stride).requires_grad_(requires_grad)
