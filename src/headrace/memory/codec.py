"""Batches as bytes: pickle protocol 5, with the data of tensors and arrays out of band, in a slot if there is one."""

import ctypes
import math
import struct
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch

from headrace.errors import SlotTooLarge
from headrace.memory.pickling import Buffer, Part, copy_into, dump, tensor_over, whole
from headrace.memory.slots import ALIGNMENT, Mapping, Ring

INLINE_BYTES = 16_384
"""Up to this size, in bytes, a batch or a part of it goes through the socket. A slot would cost more than the copy, and
a user who keeps the labels of all batches should not keep the slots of the images with them."""

INLINE_PARTS = 16
"""The largest number of parts of one batch that go through the socket."""

_INLINE = (-1, 0)
"""The place of a part that goes through the socket."""

_NO_SLOT = struct.pack("<q", -1)
"""The first bytes of a message that uses no slot."""

_HEAD_OF_TWO = struct.Struct("<6q")
"""The head of a message with two parts, if the rank is to forget no slot."""

_HEAD_ALONE = memoryview(struct.pack("<2q", -1, 0))
"""The head of a message without a slot, if the rank is to forget no slot."""


_DTYPE = attrgetter("dtype")


class SlotWriter:
    """The worker's side: writes batches into its slots.

    Args:
        ring: The worker's slots.

    Attributes:
        filled: The slot of the last batch and its used bytes; None if that batch used no slot.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._slot: tuple[int, Mapping] | None = None
        self._used = 0
        self.filled: tuple[int, int] | None = None

    def begin(self) -> None:
        """Choose the slot for the next batch, so that it can be collated in place."""
        if self._slot is None:
            try:
                self._slot = self._ring.acquire()
            except SlotTooLarge:
                self._slot = None  # if the batch needs a slot, `write` raises
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised tensor in the slot, or None if it does not fit."""
        size = dtype.itemsize * math.prod(shape)
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if self._slot is None or size <= INLINE_BYTES or start + size > self._slot[1].size:
            return None
        self._used = start + size
        return tensor_over(self._slot[1].view()[start : self._used], dtype, shape)

    def write(self, value: Any) -> list[memoryview]:
        """Encode a batch to message parts: a head, then the stream, then the parts that are not in the slot.

        The head holds the slot's number, or -1; the number of slots given up, and these; and each part's place in the
        slot.

        Raises:
            SlotTooLarge: The system refuses memory for it.
            Exception: Whatever pickle raises.
        """
        parts = dump(value)
        sizes = [len(part[0]) if len(part) == 1 else sum(map(len, part)) for part in parts]
        self.filled = None
        if sum(sizes) <= INLINE_BYTES:
            return [self._head(-1, ()), *map(whole, parts)]
        small = [number for number, size in enumerate(sizes) if size <= INLINE_BYTES][:INLINE_PARTS]
        if len(small) == len(parts):
            return [self._head(-1, ()), *map(whole, parts)]
        places = self._lay_out(parts, sizes, set(small))
        assert self._slot is not None
        number, self._slot = self._slot[0], None
        self.filled = number, self._used
        return [self._head(number, places), *(whole(parts[one]) for one in small)]

    def _head(self, number: int, places: Sequence[tuple[int, int]]) -> memoryview:
        if number < 0 and not self._ring.given_up:
            return _HEAD_ALONE
        given_up, self._ring.given_up = self._ring.given_up, []
        words = [number, len(given_up), *given_up, *chain.from_iterable(places)]
        return memoryview(struct.pack(f"<{len(words)}q", *words))

    def _lay_out(self, parts: Sequence[Part], sizes: Sequence[int], inline: set[int]) -> list[tuple[int, int]]:
        """Copy parts into the slot unless they are there; return their places, `_INLINE` for those in `inline`."""
        places = [_INLINE] * len(parts)
        missing = []
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            if number not in inline:
                inside = self._inside(part)
                places[number] = (inside or 0, size)
                if inside is None:
                    missing.append(number)
        if missing:
            needed = self._used + sum(sizes[number] + ALIGNMENT for number in missing)
            if self._slot is None or needed > self._slot[1].size:
                return self._move(parts, sizes, inline)
            view = self._slot[1].view()
            for number in missing:
                start = -(-self._used // ALIGNMENT) * ALIGNMENT
                self._used = copy_into(view, start, parts[number])
                places[number] = (start, sizes[number])
        self._ring.used(self._used)
        return places

    def _move(self, parts: Sequence[Part], sizes: Sequence[int], inline: set[int]) -> list[tuple[int, int]]:
        """Write all parts into a larger slot. Slots that are made later are at least as large."""
        old, self._slot, self._used = self._slot, None, 0
        size = sum(size + ALIGNMENT for number, size in enumerate(sizes) if number not in inline)
        try:
            self._slot = self._ring.acquire(size)
            return self._lay_out(parts, sizes, inline)
        finally:
            if old is not None:
                self._ring.release(old[0])

    def _inside(self, part: Part) -> int | None:
        """Return the offset of a part that is already in the slot, or None."""
        memory = part[0] if len(part) == 1 else b""
        if self._slot is None or not isinstance(memory, memoryview) or memory.readonly or not memory:
            return None
        offset = ctypes.addressof(ctypes.c_char.from_buffer(memory)) - self._slot[1].address
        return offset if 0 <= offset < self._slot[1].size else None


class Slots(Protocol):
    """The slots from which the rank reads batches."""

    def borrow(self, slot: int) -> memoryview:
        """Return a slot's memory; the slot may be reused when the last view of it dies."""

    def forget(self, slot: int) -> None:
        """Unmap a slot that the worker has given up."""


def is_inline(message: Sequence[Buffer]) -> bool:
    """Tell whether a message of a `SlotWriter` holds the whole batch."""
    return message[0][:8] == _NO_SLOT


def lift(message: Sequence[Buffer], slots: Slots) -> list[Buffer]:
    """Return the parts of a `SlotWriter`'s message, for `decode`. The slot is not reused while one of them lives."""
    if len(message[0]) == _HEAD_OF_TWO.size:
        number, count, inline, _, start, size = _HEAD_OF_TWO.unpack(message[0])
        if not count and inline < 0 <= start:  # most batches: the stream, and one tensor in a slot
            return [message[1], slots.borrow(number)[start : start + size]]
    number, count, *words = struct.unpack(f"<{len(message[0]) // 8}q", message[0])
    for slot in words[:count]:
        slots.forget(slot)
    if number < 0:
        return list(message[1:])
    memory = slots.borrow(number)
    inline = iter(message[1:])
    places = zip(words[count::2], words[count + 1 :: 2], strict=True)
    return [next(inline) if place == _INLINE else memory[place[0] : sum(place)] for place in places]


def slot_collate(writer: SlotWriter, as_torch: bool) -> Callable[[Any], Any]:
    """Return torch's default collation, stacking tensors straight into the writer's slot.

    Args:
        writer: The writer.
        as_torch: Whether the batch has the first tensor's dtype and gradients are refused, as in torch's workers.
            Otherwise dtypes are promoted and gradients kept, as in the caller's process, and under a plan everywhere.
    """
    from_torch = torch.utils.data._utils.collate
    refusals = (TypeError,) if as_torch else (TypeError, RuntimeError)

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        if type(first) is not torch.Tensor or first.layout is not torch.strided or first.is_nested:
            return from_torch.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        if as_torch or (set(map(type, batch)) == {torch.Tensor} and len(set(map(_DTYPE, batch))) == 1):
            shape = (len(batch), *first.shape)
            out = writer.empty(shape, first.dtype) if first.is_cpu else None
            try:
                return torch.stack(batch, 0, out=first.new_empty(shape) if out is None else out)
            except refusals:
                out = None  # not all are tensors, or one needs gradients: torch's functions know what to do
        return from_torch.collate_tensor_fn(batch, collate_fn_map=collate_fn_map) if as_torch else torch.stack(batch, 0)

    rules = {**from_torch.default_collate_fn_map, torch.Tensor: stack, int: _numbers, float: _numbers}

    def collate(batch: Any) -> Any:
        if type(batch[0]) is tuple and len(set(map(len, batch))) == 1:  # as torch does, in half the time
            return [from_torch.collate(column, collate_fn_map=rules) for column in zip(*batch, strict=True)]
        return from_torch.collate(batch, collate_fn_map=rules)

    return collate


def _numbers(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """Collate Python's numbers as torch does, in less than half the time."""
    kinds = set(map(type, batch))
    try:
        if kinds == {int}:
            return torch.as_tensor(np.frombuffer(array("q", batch), np.int64))
        if kinds == {float}:
            return torch.as_tensor(np.frombuffer(array("d", batch), np.float64))
    except OverflowError:
        kinds = set()  # torch's function raises its own error
    rule = torch.utils.data._utils.collate.default_collate_fn_map[float if isinstance(batch[0], float) else int]
    tensor: torch.Tensor = rule(batch, collate_fn_map=collate_fn_map)
    return tensor
