"""Frames: messages of several parts over a socket, each part with its length."""

import struct
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache

import numpy as np

from headrace.memory.pickling import Buffer

_MOST_PARTS = 2**16
"""One more than the largest number of parts in a frame.

A batch has fewer: each part takes a byte in a pickle of `INLINE_BYTES`, or is one of `INLINE_PARTS`.
"""

_MARK = 0x68_65_61_64_72_61 * _MOST_PARTS
"""The first word of every frame, less its number of parts: bytes that are not a frame are recognised by it."""

_WORD = struct.Struct("<Q")

_HEAD = struct.Struct("<2Q")
"""The beginning of every frame: mark and number of parts, then the bytes of all parts. The length of each follows."""

_WORD_BYTES, _HEAD_BYTES = _WORD.size, _HEAD.size

_ONE_PART = struct.Struct("<3Q")
"""The head of a frame with one part, and that part's length."""

EMPTY_FRAME = _HEAD.pack(_MARK, 0)
"""A frame without parts: a signal from a worker that is no answer."""

JOINED_BYTES = 2**16
"""Messages up to this size, in bytes, are sent in one piece."""


@lru_cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def frame(parts: Sequence[memoryview]) -> list[memoryview]:
    """Return a frame with these parts, in pieces to be sent one after another."""
    sizes = [*map(len, parts)]
    total = sum(sizes)
    head = _words(2 + len(sizes)).pack(_MARK + len(sizes), total, *sizes)
    if total <= JOINED_BYTES:  # a copy costs less than waking the other side for each part
        return [memoryview(b"".join((head, *parts)))]
    return [memoryview(head), *(part for part in parts if len(part))]


def frame_of_one(part: bytes) -> memoryview:
    """Return a frame with one part, which is small."""
    return memoryview(_ONE_PART.pack(_MARK + 1, len(part), len(part)) + part)


def _begin(head: Buffer) -> tuple[int, int]:
    """Return the number of parts in a frame, and their size together in bytes.

    Raises:
        ValueError: It is not the head of a frame.
    """
    count, total = _HEAD.unpack_from(head)
    if not 0 <= count - _MARK < _MOST_PARTS:
        raise ValueError("it does not begin as one")
    return count - _MARK, total


def _checked(sizes: Sequence[int], total: int) -> Sequence[int]:
    if sum(sizes) != total:
        raise ValueError("its parts are not as long as it says")
    return sizes


def _first_frame(rest: memoryview) -> tuple[list[bytearray], memoryview]:
    """Return the parts of the first frame and the bytes behind it.

    If the frame has no parts, or has not arrived whole, return no parts and all the bytes.
    """
    arrived = len(rest)
    if arrived < _HEAD_BYTES:
        return [], rest
    count, total = _begin(rest)
    end = _HEAD_BYTES + _WORD_BYTES * count
    if not count or arrived < end + total:
        return [], rest
    parts = []
    for size in _checked(_words(count).unpack_from(rest, _HEAD_BYTES), total):
        parts.append(bytearray(rest[end : end + size]))
        end += size
    return parts, rest[end:]


def read_frames(deliver: Callable[[list[bytearray]], None]) -> Generator[memoryview, int, None]:
    """Cut bytes into frames, without end. Yields the memory to fill next; send it how many bytes were filled.

    Small frames are read together. A large part is read into the memory where it stays.

    Args:
        deliver: Called with the parts of each frame.

    Raises:
        ValueError: The bytes are not a frame.
    """
    scratch = np.empty(JOINED_BYTES, np.uint8).data  # numpy leaves its pages untouched until they are needed
    rest = scratch[:0]

    def take(size: int) -> Generator[memoryview, int, bytearray]:
        """Return this many bytes when they have come."""
        nonlocal rest
        part = bytearray(size)
        missing = memoryview(part)
        while True:
            count = min(len(missing), len(rest))
            missing[:count] = rest[:count]
            missing, rest = missing[count:], rest[count:]
            if not missing:
                return part
            if len(missing) < len(scratch):
                rest = scratch[: (yield scratch)]
            else:
                missing = missing[(yield missing) :]

    while True:
        if not rest:
            rest = scratch[: (yield scratch)]
        parts, rest = _first_frame(rest)
        if not parts:
            count, total = _begin((yield from take(_HEAD_BYTES)))
            words = yield from take(_WORD_BYTES * count)
            for size in _checked([size for (size,) in _WORD.iter_unpack(words)], total):
                parts.append((yield from take(size)))
        deliver(parts)
        del parts  # the batch's memory belongs to the user now
