"""Archives that can only be read forward: compressed files, standard input, and the output of commands."""

import bz2
import gzip
import lzma
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import IO, Any

from headrace.errors import MissingExtra, ShardCorrupt
from headrace.shards.names import COMMAND

STANDARD_INPUT = "-"

_CHUNK_BYTES = 2**20
"""How much is read at a time, so that memory is allocated for data that has arrived, not for what a header claims."""

_ENDLESS = sys.maxsize


class Forward:
    """The bytes of a file that is read from its beginning to its end; slices must follow each other.

    Args:
        file: The file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._at = 0
        self._kept = b""  # the last slice, of which the next may want the end again

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, place: slice) -> bytes:
        """Return the bytes from `start` to `stop`; fewer at the end of the file."""
        start, stop = place.start, place.stop
        begun = self._at - len(self._kept)
        if begun <= start <= stop <= self._at:
            return self._kept[start - begun : stop - begun]
        if start < self._at:
            raise ValueError(f"bytes {start} to {stop} were read before")
        for _ in self._read(start - self._at):
            pass
        self._kept = b"".join(self._read(stop - start))
        return self._kept

    def finish(self) -> None:
        """Read what is left: a compressed file has a checksum at its end, and a command must not be cut off."""
        for _ in self._read(_ENDLESS):
            pass

    def _read(self, count: int) -> Iterator[bytes]:
        """Yield the next bytes in pieces."""
        while count > 0:
            piece = self._file.read(min(count, _CHUNK_BYTES))
            if not piece:
                return
            self._at += len(piece)
            count -= len(piece)
            yield piece


@contextmanager
def opened(source: str) -> Iterator[Forward]:
    """Open a source for a block.

    Args:
        source: A path, which may end in `.gz`, `.tgz`, `.bz2`, `.xz` or `.zst`; `-` for standard input; or `pipe:` and
            a shell command.

    Raises:
        MissingExtra: The file is compressed by zstd, and the package for it is not installed.
        OSError: It cannot be read.
        ShardCorrupt: It is damaged, or the command failed.
    """
    try:
        if source == STANDARD_INPUT:
            yield Forward(sys.stdin.buffer)
        elif source.startswith(COMMAND):
            with subprocess.Popen(source.removeprefix(COMMAND), shell=True, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                forward = Forward(process.stdout)
                try:
                    yield forward
                except GeneratorExit:  # the reader has gone, so the command is ended
                    process.kill()
                    raise
                forward.finish()
            if process.returncode:
                raise ShardCorrupt(f"{source} ended with exit code {process.returncode}")
        else:
            with _opener(source)(source) as file:
                forward = Forward(file)
                yield forward
                forward.finish()
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ShardCorrupt(f"{source} is damaged: {error}") from error


def _opener(source: str) -> Callable[[str], IO[bytes]]:
    suffix = source.rpartition(".")[2]
    if suffix == "zst":
        return _zstd
    by_suffix: dict[str, Callable[[str], Any]] = {
        "gz": gzip.open,
        "tgz": gzip.open,
        "bz2": bz2.open,
        "xz": lzma.open,
    }
    return by_suffix.get(suffix, _plain)


def _plain(path: str) -> IO[bytes]:
    return open(path, "rb")


def _zstd(path: str) -> IO[bytes]:
    for name in ("compression.zstd", "zstandard"):
        try:
            opened: IO[bytes] = import_module(name).open(path, "rb")
        except ImportError:
            continue
        return opened
    raise MissingExtra("reading .zst files needs zstandard: pip install 'headrace[zstd]'")
