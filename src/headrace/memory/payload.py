"""One value for many processes: pickled once, with its tensors and arrays in shared memory."""

import gc
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.memory.pickling import copy_into, decode, dump
from headrace.memory.slots import ALIGNMENT, Mapping, anonymous_file
from headrace.system.interrupts import Droppable

_HEAD = struct.Struct("<3Q")
"""The file's size in bytes, the offset of its table of parts, and the number of parts."""


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector, which would visit millions of objects again and again while they are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Payload(Droppable):
    """A pickled value in an anonymous file. A process that maps it shares its pages until it writes to them.

    Args:
        value: The value to share.

    Raises:
        Exception: Whatever pickle raises for a value that can only be inherited, or not be pickled at all.
    """

    def __init__(self, value: Any) -> None:
        with _no_collection():
            parts = dump(value, shared=False)
        places, size = [], 0
        for part in parts:
            length = sum(map(len, part))
            places += [size, length]
            size += -(-length // ALIGNMENT) * ALIGNMENT
        table = struct.pack(f"<{len(places)}Q", *places)
        self._head = _HEAD.pack(size + len(table), size, len(parts))
        self._descriptor = anonymous_file(size + len(table))
        memory = Mapping(self._descriptor, size + len(table)).view()
        memory[size:] = table
        for start, part in zip(places[0::2], parts, strict=True):
            copy_into(memory, start, part)

    def send(self, end: socket.socket) -> None:
        """Send the file's descriptor over a Unix socket. The message is short, so this does not wait for a reader."""
        socket.send_fds(end, [self._head], [self._descriptor])

    def _dropped(self) -> None:
        descriptor = vars(self).pop("_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


def receive(end: socket.socket) -> Any:
    """Receive a value. Its tensors and arrays are writable; writes stay in this process."""
    head, descriptors, _, _ = socket.recv_fds(end, _HEAD.size, 1)
    size, table, count = _HEAD.unpack(head)
    try:
        memory = Mapping(descriptors[0], size, private=True).view()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    places = struct.unpack(f"<{2 * count}Q", memory[table:])
    with _no_collection():
        return decode(
            [memory[start : start + length] for start, length in zip(places[0::2], places[1::2], strict=True)]
        )
