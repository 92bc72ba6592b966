"""One value for many processes: pickled once, its tensors and arrays shared rather than copied."""

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.memory.codec import Buffer, decode, encode
from headrace.memory.slots import ALIGNMENT, Mapping, anonymous_file


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from looking through millions of objects again and again while they are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Payload:
    """A pickled value in an anonymous file. Whoever maps it shares its pages until it writes to them.

    Args:
        value: What to share.

    Raises:
        Exception: Whatever pickle raises for a value that can only be inherited, or not be pickled at all.
    """

    def __init__(self, value: Any) -> None:
        with _no_collection():
            parts = encode(value, shared=False)
        places, size = [], 0
        for part in parts:
            places.append((size, len(part)))
            size += -(-len(part) // ALIGNMENT) * ALIGNMENT
        self._size = max(size, 1)
        self._places = places
        self._descriptor = anonymous_file(self._size)
        memory = Mapping(self._descriptor, self._size).view()
        for (start, length), part in zip(places, parts, strict=True):
            memory[start : start + length] = part

    def send(self, end: socket.socket) -> None:
        """Pass the file to a process, over a Unix socket."""
        words = [self._size, len(self._places), *(word for place in self._places for word in place)]
        head = b"".join(word.to_bytes(8, "little") for word in words)
        socket.send_fds(end, [len(head).to_bytes(8, "little")], [self._descriptor])
        end.sendall(head)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def receive(end: socket.socket) -> Any:
    """Rebuild a value that was sent; its tensors and arrays are writable, but writes stay in this process."""
    length, descriptors, _, _ = socket.recv_fds(end, 8, 1)
    try:
        head = b""
        while len(head) < int.from_bytes(length, "little"):
            head += end.recv(int.from_bytes(length, "little") - len(head))
        size, count, *words = (int.from_bytes(head[at : at + 8], "little") for at in range(0, len(head), 8))
        memory = Mapping(descriptors[0], size, private=True).view()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    parts: list[Buffer] = [memory[words[2 * one] : words[2 * one] + words[2 * one + 1]] for one in range(count)]
    with _no_collection():
        return decode(parts)
