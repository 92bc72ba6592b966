"""Slots: anonymous shared memory that a worker owns, writes batches into, and gets back from the rank.

A slot is a file without a path, so none can be left behind. Its descriptor is passed once over a socket, mapped by the
rank, and closed on both sides. The mapping alone keeps the memory.
"""

import ctypes
import functools
import mmap
import os
import socket
import struct
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.errors import SlotTooLarge
from headrace.system.limits import free_memory

ALIGNMENT = 64
"""The alignment of tensors in a slot, in bytes: a cache line."""

RECENT = 8
"""Slots are made for the largest of this number of recent batches."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.malloc.restype = ctypes.c_void_p
_LIBC.malloc.argtypes = [ctypes.c_size_t]
_LIBC.free.argtypes = [ctypes.c_void_p]
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10  # Linux and macOS

_SLOT = struct.Struct("<2Q")
"""The message with a slot's descriptor: its number, and its size in bytes."""

_LEARNT_BYTES = 2**25 - 2**16
"""The size of a block just below the largest from which glibc adapts its limits, in bytes."""


def keep_freed_memory() -> None:
    """Let malloc reuse the memory of one batch for the next, instead of getting cleared pages from the kernel.

    glibc adapts to the largest block freed so far: smaller blocks come from its heap, and it keeps twice that size of
    free heap. The block freed here is never written to.
    """
    _LIBC.free(_LIBC.malloc(_LEARNT_BYTES))


class Mapping:
    """Memory that is mapped while this object lives. Unlike `mmap.mmap` it keeps no descriptor open.

    The file is mapped over the memory of an `mmap.mmap`, which unmaps it in C. A `__del__` would not be safe: after a
    Ctrl-C in it, its remaining lines never run.

    Args:
        descriptor: The file to share; it may be closed afterwards. None for memory of this process alone.
        size: Its length in bytes.
        private: Whether writes to a file stay in this process.

    Attributes:
        address: Its first address.
        size: Its length in bytes.
        pages: Keeps it mapped.

    Raises:
        SlotTooLarge: The system has no address space for it.
    """

    def __init__(self, descriptor: int | None, size: int, private: bool = False) -> None:
        protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        try:
            # Under a file read-only, so that the kernel does not count it as committed memory.
            before = protection if descriptor is None else mmap.PROT_READ
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANON, before)
        except OSError as error:
            raise _unmappable(size, error.errno) from error
        self.pages: Any = pages
        self.address: int = np.frombuffer(pages, np.uint8).ctypes.data
        self.size = size
        if descriptor is None:
            return
        if _LIBC.mmap(self.address, size, protection, kind | _MAP_FIXED, descriptor, 0) == _FAILED:
            raise _unmappable(size, ctypes.get_errno())

    def lease(self) -> Any:
        """Return an array over the memory. The array and all views of it keep the mapping alive."""
        array = _lease_type(self.size).from_address(self.address)
        array.pages = self.pages
        return array

    def view(self) -> memoryview:
        """Return the memory as writable bytes."""
        return memoryview(self.lease()).cast("B")


def _unmappable(size: int, number: int | None) -> SlotTooLarge:
    return SlotTooLarge(f"{size} bytes of memory cannot be mapped: {os.strerror(number or 0)}")


def anonymous_file(size: int) -> int:
    """Return the descriptor of a file without a name. Its memory is allocated now, not at the first write.

    Raises:
        SlotTooLarge: The system refuses the memory. At the first write this would be a SIGBUS.
    """
    room = free_memory()  # the kernel does not refuse a larger request, but kills a process
    if room is not None and size > room:
        raise _refused(size, f"{room} bytes of memory are left")
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:  # unlinked as soon as it is made
            descriptor = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise _refused(size, str(error.strerror)) from error
    return descriptor


def _refused(size: int, why: str) -> SlotTooLarge:
    return SlotTooLarge(
        f"a batch needs {size} bytes of shared memory, which the system refuses: {why}. "
        "Use a smaller batch_size, fewer workers or a smaller prefetch_factor, or raise the limit."
    )


class Ring:
    """A worker's slots. A new one is made when the rank holds all of them, or a batch is larger than each.

    Args:
        descriptors: The socket over which the rank gets the descriptor of each new slot; None where it maps no slots.

    Attributes:
        given_up: Slots that were too small or far too large; the rank is told to forget them.
    """

    def __init__(self, descriptors: socket.socket | None) -> None:
        self.given_up: list[int] = []
        self._descriptors = descriptors
        self._slots: dict[int, Mapping] = {}
        self._free: list[int] = []
        self._made = 0
        self._recent: deque[int] = deque(maxlen=RECENT)

    def release(self, slot: int) -> None:
        """Take a slot back."""
        self._free.append(slot)

    def memory(self, slot: int) -> memoryview:
        """Return the whole memory of a slot."""
        return self._slots[slot].view()

    def forget(self, slot: int) -> None:
        """Unmap a slot that the rank will not give back."""
        del self._slots[slot]

    def acquire(self, size: int = 0) -> tuple[int, Mapping] | None:
        """Return a free slot of at least `size` bytes, or a new one; None while no batch has needed a slot.

        Raises:
            SlotTooLarge: The system refuses the memory.
        """
        wanted = _rounded(max(size, *self._recent, 0))
        if not wanted:
            return None
        while self._free:
            slot = self._free.pop()
            if wanted <= self._slots[slot].size <= 4 * wanted:
                return slot, self._slots[slot]
            del self._slots[slot]
            self.given_up.append(slot)
        return self._make(wanted)

    def used(self, size: int) -> None:
        """Note how many bytes of its slot a batch took; new slots are made for the largest recent batch."""
        self._recent.append(size)

    def _make(self, size: int) -> tuple[int, Mapping]:
        descriptor = anonymous_file(size)
        try:
            mapping = Mapping(descriptor, size)
            slot, self._made = self._made, self._made + 1
            head = _SLOT.pack(slot, size)
            if self._descriptors is not None:
                socket.send_fds(self._descriptors, [head], [descriptor])
        finally:
            os.close(descriptor)
        self._slots[slot] = mapping
        return slot, mapping


def _rounded(size: int) -> int:
    """Return a size with an eighth more for growth, in whole pages."""
    return -(-(size + size // 8) // mmap.PAGESIZE) * mmap.PAGESIZE if size else 0


class Loans:
    """The rank's view of one worker's slots: which are mapped, which the user still holds, which may go back.

    Args:
        descriptors: The socket over which the worker sends each new slot's descriptor.

    Attributes:
        lent: How many slots the worker has: it writes to them, or they are free there.
        spare: The slots that neither the user nor the worker holds; filled from any thread.
        pin: Called with each slot that is mapped, if it is not None.
    """

    def __init__(self, descriptors: socket.socket) -> None:
        self.lent = 0
        self.pin: Callable[[Mapping], None] | None = None
        descriptors.setblocking(False)
        self._descriptors = descriptors
        self._slots: dict[int, Mapping] = {}
        self._watched: dict[int, weakref.ref[object]] = {}
        self.spare: deque[_LeaseReference] = deque()
        self._dropped: list[int] = []
        self._unused: set[int] = set()  # given up by the worker before they carried a batch

    def borrow(self, slot: int) -> memoryview:
        """Return a slot's memory. When the last tensor, array or view over it dies, the slot may go back.

        Raises:
            SlotTooLarge: It cannot be mapped.
            ValueError: There is no such slot.
        """
        if slot in self._slots:
            self.lent -= 1
        while slot not in self._slots:
            self._map_next()
        lease = self._slots[slot].lease()
        self._watched[slot] = watch = _LeaseReference(lease, self.spare.append)
        watch.slot = slot
        return memoryview(lease).cast("B")

    def lend(self, tasks: int, new: int = 1) -> tuple[list[int], list[int]]:
        """Return spare slots for the last `new` of the worker's `tasks`, and the slots that it is to forget.

        A worker gets no more slots than it can fill: spare slots that stay here can be dropped when another worker
        needs a new one. It gets one for each new task: slots sent with a later task would come too late.
        """
        back: list[int] = []
        for _ in range(min(new, tasks - self.lent, len(self.spare))):
            back.append(self.spare.popleft().slot)
            self.lent += 1
        dropped, self._dropped = self._dropped, []
        return back, dropped

    def drop(self) -> int:
        """Unmap a spare slot; return its size in bytes."""
        slot = self.spare.popleft().slot
        size = self._slots.pop(slot).size
        del self._watched[slot]
        self._dropped.append(slot)
        return size

    def forget(self, slot: int) -> None:
        """Unmap a slot that the worker has given up."""
        if slot in self._slots:
            self.lent -= slot in self._watched  # a slot that never carried a batch was not lent
            self._watched.pop(slot, None)
            del self._slots[slot]
        else:
            self._unused.add(slot)

    def close(self) -> None:
        """Unmap every slot that no tensor uses."""
        self._slots.clear()
        self._watched.clear()

    def sizes(self) -> list[int]:
        """Return the sizes of the slots that are mapped, in bytes."""
        return [slot.size for slot in self._slots.values()]

    def __len__(self) -> int:
        return len(self._slots)

    def _map_next(self) -> None:
        try:  # the descriptor was sent before the message that names the slot
            head, descriptors, flags, _ = socket.recv_fds(self._descriptors, _SLOT.size, 1)
        except BlockingIOError:
            raise ValueError("there is no such slot") from None
        if not descriptors and flags & socket.MSG_CTRUNC:
            raise SlotTooLarge("a slot's descriptor could not be received: this process has too many files open")
        try:
            slot, size = _SLOT.unpack(head)
            if [os.fstat(one).st_size for one in descriptors] != [size]:
                raise ValueError("what came is no slot")
            if slot in self._unused:
                self._unused.remove(slot)
            else:
                self._slots[slot] = mapping = Mapping(descriptors[0], size)
                if self.pin is not None:
                    self.pin(mapping)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


class BufferPool:
    """The rank's own memory for batches. A buffer is reused when the last view of it dies.

    Args:
        spare: The number of unused buffers that are kept.
        private: Whether forked processes get copies. Otherwise they share the buffers.

    Attributes:
        spare: The same.
        pin: Called with each new buffer, if it is not None.
    """

    def __init__(self, spare: int, private: bool = False) -> None:
        self.pin: Callable[[Mapping], None] | None = None
        self.spare = spare
        self._private = private
        self._buffers: dict[int, tuple[Mapping, _LeaseReference]] = {}
        self._returned: deque[_LeaseReference] = deque()  # filled from any thread
        self._count = 0

    def take(self, size: int) -> memoryview:
        """Return memory of `size` bytes.

        Raises:
            SlotTooLarge: The system does not provide it.
        """
        wanted, mapping = _rounded(size), None
        while self._returned and (mapping is None or len(self._returned) > self.spare):
            buffer, _ = self._buffers.pop(self._returned.popleft().slot)
            if wanted <= buffer.size <= 4 * wanted:
                mapping = buffer
        if mapping is None and self._private:
            mapping = Mapping(None, wanted)
        elif mapping is None:
            descriptor = anonymous_file(wanted)
            try:
                mapping = Mapping(descriptor, wanted)
            finally:
                os.close(descriptor)
            if self.pin is not None:
                self.pin(mapping)
        lease = mapping.lease()
        watch = _LeaseReference(lease, self._returned.append)
        watch.slot = self._count
        self._buffers[self._count] = mapping, watch
        self._count += 1
        return memoryview(lease).cast("B")[:size]

    def sizes(self) -> list[int]:
        """Return the sizes of the buffers, in bytes."""
        return [mapping.size for mapping, _ in list(self._buffers.values())]


@functools.cache
def _lease_type(size: int) -> type[Any]:
    """Return an array type that allows attributes, unlike its base."""
    return type("Lease", (ctypes.c_char * size,), {})


class _LeaseReference(weakref.ref[Any]):
    """A weak reference to a lease. Its callback must be a C function, since a Ctrl-C in a Python callback is lost.

    Attributes:
        slot: The slot that is free when the lease dies.
    """

    __slots__ = ("slot",)
    slot: int
