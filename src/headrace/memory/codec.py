"""Batches as bytes: pickle protocol 5, the data of tensors and arrays out of band, in a slot if there is one."""

import ctypes
import io
import math
import pickle
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch

from headrace.errors import SlotTooLarge
from headrace.memory.slots import ALIGNMENT, Loans, Mapping, Ring

Buffer = bytes | bytearray | memoryview

_Spans = dict[int, list[tuple[int, int]]]
"""By storage, where its tensors begin and end, as addresses."""

INLINE_BYTES = 16_384
"""Up to this size a batch, or a part of one, goes through the socket: a slot would cost more than the copy, and who
keeps the labels of every batch should not keep the images' slots with them."""

INLINE_PARTS = 16
"""No more parts of one batch than these."""

_INLINE = (-1, 0)
"""The place of a part that goes through the socket."""

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes that torch cannot unpickle, and those that hold the same bits."""


class _Pickler(pickle.Pickler):
    """Lays the bytes of plain tensors out of band; torch's own pickling would copy them twice.

    Attributes:
        refuses_shared: Whether a tensor in shared memory is an error, since a copy would no longer be shared.
    """

    refuses_shared = False

    def __init__(self, stream: io.BytesIO, take: Callable[[pickle.PickleBuffer], object], whole: "_Storages") -> None:
        super().__init__(stream, protocol=5, buffer_callback=take)
        self.spans: _Spans = {}
        self._whole = whole

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if self.refuses_shared and value.is_shared():  # type: ignore[no-untyped-call]
            raise pickle.PicklingError("a tensor in shared memory can only be inherited")
        if type(value) is not torch.Tensor:
            return NotImplemented
        if not _is_plain(value):
            signed = _SIGNED.get(value.dtype)
            return NotImplemented if signed is None else (_viewed, (value.view(signed), value.dtype))
        if value.numel():
            span = self.spans.setdefault(value.untyped_storage().data_ptr(), [])
            span.append((value.data_ptr(), value.data_ptr() + value.nbytes))
            whole = self._whole.get(value.untyped_storage().data_ptr())
            if whole is not None:
                layout = (value.dtype, tuple(value.shape), value.requires_grad)
                return _alias, (whole, value.data_ptr() - whole.address, *layout)
        raw: Any = value.detach().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw), value.dtype, tuple(value.shape), value.requires_grad)


class _Region:
    """The part of a storage that several tensors share; pickled once, as the memory they are views of."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self._bytes = (ctypes.c_char * size).from_address(address)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return memoryview, (pickle.PickleBuffer(self._bytes),)


_Storages = dict[int, _Region]


def _overlapping(spans: _Spans) -> _Storages:
    """Return the region of each storage in which tensors overlap; most batches have none."""
    regions = {}
    for storage, ends in spans.items():
        ordered = sorted(ends)
        if any(start < end for (_, end), (start, _) in pairwise(ordered)):
            first, last = ordered[0][0], max(end for _, end in ordered)
            regions[storage] = _Region(first, last - first)
    return regions


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
    flat = torch.frombuffer(raw, dtype=dtype) if len(raw) else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(shape).requires_grad_(requires_grad)


def _alias(raw: Buffer, start: int, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    flat = torch.frombuffer(raw, dtype=dtype, offset=start, count=math.prod(shape))
    return flat.reshape(shape).requires_grad_(requires_grad)


def _viewed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.view(dtype)


def encode(value: Any, shared: bool = True) -> list[memoryview]:
    """Pickle any value to byte views: the stream first, then the tensors' and arrays' data, uncopied.

    Args:
        value: What to pickle.
        shared: Whether tensors in shared memory may be copied like others.

    Raises:
        Exception: Whatever pickle raises for a value that cannot be pickled.
    """
    whole: _Storages = {}
    while True:
        stream = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        pickler = _Pickler(stream, buffers.append, whole)
        pickler.refuses_shared = not shared
        pickler.dump(value)
        if whole or not (whole := _overlapping(pickler.spans)):
            return [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]


def decode(parts: Sequence[Buffer]) -> Any:
    """Rebuild a value over its parts' memory: tensors and arrays are writable and alias `parts`."""
    return pickle.loads(parts[0], buffers=parts[1:])


class SlotWriter:
    """A worker's side: lays batches into its slots.

    Args:
        ring: The worker's slots.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._slot: tuple[int, Mapping] | None = None
        self._used = 0

    def begin(self) -> None:
        """Choose the slot for the next batch, so that it can be collated in place."""
        if self._slot is None:
            with suppress(SlotTooLarge):  # the batch may need none; if it does, `write` raises
                self._slot = self._ring.acquire()
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised tensor in the slot, or None where there is no room."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if self._slot is None or size <= INLINE_BYTES or start + size > self._slot[1].size:
            return None
        self._used = start + size
        memory = self._slot[1].view()[start : self._used]
        return torch.frombuffer(memory, dtype=dtype).reshape(tuple(shape))

    def write(self, value: Any) -> list[memoryview]:
        """Encode a batch to message parts: a head, then the stream, then what did not go into the slot.

        The head holds the slot's number, or -1; the slots given up, after their count; and where in the slot each
        part lies.

        Raises:
            SlotTooLarge: The system refuses memory for it.
            Exception: Whatever pickle raises.
        """
        parts = encode(value)
        if sum(map(len, parts)) <= INLINE_BYTES:
            return [self._head(-1, []), *parts]
        small = [number for number, part in enumerate(parts) if len(part) <= INLINE_BYTES][:INLINE_PARTS]
        if len(small) == len(parts):
            return [self._head(-1, []), *parts]
        places = self._lay_out(parts, set(small))
        assert self._slot is not None
        number, self._slot = self._slot[0], None
        return [self._head(number, places), *(parts[one] for one in small)]

    def _head(self, number: int, places: Sequence[tuple[int, int]]) -> memoryview:
        given_up, self._ring.given_up = self._ring.given_up, []
        words = [number, len(given_up), *given_up, *(coordinate for place in places for coordinate in place)]
        return memoryview(struct.pack(f"<{len(words)}q", *words))

    def _lay_out(self, parts: list[memoryview], inline: set[int]) -> list[tuple[int, int]]:
        """Copy parts into the slot unless they are there; return where each lies, `_INLINE` for those in `inline`."""
        places = [_INLINE] * len(parts)
        missing = []
        for number, part in enumerate(parts):
            if number not in inline:
                inside = self._inside(part)
                places[number] = (inside or 0, len(part))
                if inside is None:
                    missing.append(number)
        needed = self._used + sum(len(parts[number]) + ALIGNMENT for number in missing)
        if self._slot is None or needed > self._slot[1].size:
            return self._move(parts, inline)
        view = self._slot[1].view()
        for number in missing:
            start = -(-self._used // ALIGNMENT) * ALIGNMENT
            self._used = start + len(parts[number])
            view[start : self._used] = parts[number]
            places[number] = (start, len(parts[number]))
        self._ring.used(self._used)
        return places

    def _move(self, parts: list[memoryview], inline: set[int]) -> list[tuple[int, int]]:
        """Lay everything into a larger slot; the next batches will find it large enough from the beginning."""
        old, self._slot, self._used = self._slot, None, 0
        size = sum(len(part) + ALIGNMENT for number, part in enumerate(parts) if number not in inline)
        try:
            self._slot = self._ring.acquire(size)
            return self._lay_out(parts, inline)
        finally:
            if old is not None:
                self._ring.release(old[0])

    def _inside(self, part: memoryview) -> int | None:
        """Return where in the slot a part lies already, or None."""
        if self._slot is None or not len(part):
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(part)) if not part.readonly else 0
        offset = address - self._slot[1].address
        return offset if 0 <= offset < self._slot[1].size else None


def lift(message: Sequence[bytearray], loans: Loans) -> list[Buffer]:
    """Return the parts of what a `SlotWriter` wrote, to be decoded; while one of them lives, the slot is on loan."""
    number, count, *words = struct.unpack(f"<{len(message[0]) // 8}q", message[0])
    for slot in words[:count]:
        loans.forget(slot)
    if number < 0:
        return list(message[1:])
    memory = loans.borrow(number)
    inline = iter(message[1:])
    places = zip(words[count::2], words[count + 1 :: 2], strict=True)
    return [next(inline) if place == _INLINE else memory[place[0] : sum(place)] for place in places]


def slot_collate(writer: SlotWriter, as_torch: bool) -> Callable[[Any], Any]:
    """Return torch's default collation, stacking tensors straight into the writer's slot.

    Args:
        writer: Where they go.
        as_torch: Whether the batch takes the first tensor's dtype and refuses gradients, as in torch's workers, or
            promotes dtypes and keeps gradients, as in torch's own process and under a plan everywhere.
    """
    from_torch = torch.utils.data._utils.collate

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        if type(first) is not torch.Tensor or first.layout is not torch.strided or first.is_nested:
            return from_torch.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        if not as_torch and any(one.dtype is not first.dtype or one.requires_grad for one in batch):
            return torch.stack(batch, 0)
        shape = (len(batch), *first.shape)
        out = writer.empty(shape, first.dtype)
        return torch.stack(batch, 0, out=first.new_empty(shape) if out is None else out)

    rules = {**from_torch.default_collate_fn_map, torch.Tensor: stack}
    return lambda batch: from_torch.collate(batch, collate_fn_map=rules)
