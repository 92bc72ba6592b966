"""Reading byte ranges of local files through few descriptors: the place where other stores will come in."""

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Sequence

from headrace.errors import ShardCorrupt
from headrace.system.interrupts import Droppable

_MOST_OPEN = 256
"""The largest number of files that are kept open, whatever the limit of the process is."""


def most_open() -> int:
    """Return how many files to keep open: a quarter of the descriptors that this process may have, at most 256."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if allowed == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, allowed // 4))


class _Open:
    """An open file, and how many calls are reading it."""

    __slots__ = ("descriptor", "readers")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.readers = 0


class Files(Droppable):
    """Files that are opened when they are read, and closed when others are needed more.

    Threads may read at the same time. A forked process reads through the descriptors that it has inherited: reads have
    places of their own, so nobody moves another's. A pickled copy opens its own. All are closed when the object is
    dropped.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def __reduce__(self) -> tuple[type["Files"], tuple[()]]:
        return Files, ()

    def size(self, path: str) -> int:
        """Return a file's size in bytes.

        Raises:
            OSError: It does not exist or may not be read.
        """
        return os.stat(path).st_size

    def read(self, path: str, size: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return byte ranges of a file.

        Args:
            path: The file.
            size: The size that it must have, in bytes.
            ranges: The first byte and the number of bytes of each; all lie within the size.

        Raises:
            OSError: It cannot be read.
            ShardCorrupt: It has another size, or has become shorter.
        """
        file = self._take(path, size)
        descriptor, pread = file.descriptor, os.pread
        try:
            pieces = [pread(descriptor, count, start) for start, count in ranges]
            if sum(map(len, pieces)) == sum([count for _, count in ranges]):
                return pieces
            return [
                _continued(descriptor, data, start, count, path)
                for data, (start, count) in zip(pieces, ranges, strict=True)
            ]
        finally:
            with self._lock:
                file.readers -= 1

    def _take(self, path: str, size: int) -> "_Open":
        """Return an open file that counts one reader more."""
        if self._owner != os.getpid():  # forked: the lock may have been held by a thread that does not exist here
            self._owner, self._lock = os.getpid(), threading.Lock()
            for file in self._open.values():
                file.readers = 0
        with self._lock:
            found = self._open.get(path)
            if found is None:
                self._close_unused(most_open() - 1)
                found = self._open[path] = _Open(self._opened(path, size))
            else:
                self._open.move_to_end(path)
            found.readers += 1
            return found

    def _opened(self, path: str, size: int) -> int:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._close_unused(0)  # others need descriptors, too
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(descriptor).st_size
        if found == size:
            return descriptor
        os.close(descriptor)
        raise ShardCorrupt(
            f"{path} has {found} bytes and had {size} when it was indexed. Make its index again: headrace index"
        )

    def _close_unused(self, kept: int) -> None:
        for path in [path for path, file in self._open.items() if not file.readers][: max(0, len(self._open) - kept)]:
            os.close(self._open.pop(path).descriptor)

    def close(self) -> None:
        """Close all files that nobody is reading."""
        with self._lock:
            self._close_unused(0)

    _dropped = close


def _continued(descriptor: int, data: bytes, start: int, count: int, path: str) -> bytes:
    """Return a range of which a first read may have given less than all: one of more than 2 GiB comes in pieces."""
    pieces = [data]
    while data and (count := count - len(data)):
        start += len(data)
        data = os.pread(descriptor, count, start)
        pieces.append(data)
    if count:
        raise ShardCorrupt(f"{path} has become shorter: it ends at byte {start}")
    return b"".join(pieces)
