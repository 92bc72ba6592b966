"""Archives that can only be read forward: files, also compressed ones, standard input, and the output of commands."""

import bz2
import io
import lzma
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import IO, Any, NamedTuple, Protocol

from headrace.errors import MissingExtra, ShardCorrupt
from headrace.shards.names import COMMAND
from headrace.shards.tar import BLOCK, is_header

STANDARD_INPUT = "-"

_CHUNK_BYTES = 2**20
"""How much is read at a time, so that memory is allocated for data that has arrived, not for what a header claims."""

_PACKED_BYTES = 2**16
"""How much compressed data is read at a time."""

_UNPACKED_BYTES = 2**17
"""How much is decompressed at a time, at least."""

_MOST_DICTIONARY_BYTES = 2**30
"""The most memory that an xz archive may ask for; `xz -9` needs 65 MiB. Packages for zstd have limits of their own."""

_EXIT_S = 5.0
"""How long a command whose output has ended may take to end itself, after an error; its exit code may explain that."""

_ENDLESS = sys.maxsize


class Readable(Protocol):
    """What is read from its beginning to its end."""

    def read(self, size: int, /) -> bytes:
        """Return so many bytes; fewer at the end."""


class Forward:
    """The bytes of a file that is read from its beginning to its end; slices must follow each other.

    Args:
        file: The file.
        first: Its first bytes, where these were read before.
    """

    def __init__(self, file: Readable, first: bytes = b"") -> None:
        self._file = file
        self._at = len(first)
        self._kept = first  # the last slice, of which the next may want the end again

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
    """Open a source for a block. Whether and how it is compressed is seen from its first bytes, not from its name.

    Args:
        source: A path; `-` for standard input; or `pipe:` and a shell command.

    Raises:
        MissingExtra: It is compressed by zstd, and the package for it is not installed.
        OSError: It cannot be read.
        ShardCorrupt: It is damaged, or the command failed.
    """
    try:
        with _raw(source) as file:
            forward = _unpacked(file)
            yield forward
            forward.finish()
    except OSError as error:
        error.filename = error.filename or source
        raise


@contextmanager
def _raw(source: str) -> Iterator["_Source"]:
    if source == STANDARD_INPUT:
        yield _Source(sys.stdin.buffer, source)
    elif source.startswith(COMMAND):
        # A session of its own: all that the shell starts can be ended together.
        command = source.removeprefix(COMMAND)
        process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, start_new_session=True)
        try:
            yield from _output(process, source)
        finally:
            _end(process)
    else:
        with open(source, "rb") as file:
            yield _Source(file, source, direct=True)


def _output(process: subprocess.Popen[bytes], source: str) -> Iterator["_Source"]:
    """Yield a command's output; then, or where reading failed because that ended too early, look at its exit code."""
    assert process.stdout is not None
    file = _Source(process.stdout, source)
    try:
        yield file
        process.wait()
    except ShardCorrupt:
        if not file.ended:
            raise
        try:
            code = process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            code = 0
        if not code:
            raise
    if process.returncode:
        raise ShardCorrupt(f"{source} {_exit(process.returncode)}")


def _exit(code: int) -> str:
    return f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command, and all that it has started, if it is still running."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()
    process.wait()


class _Source:
    """A source's own bytes.

    Attributes:
        file: What follows the first bytes.
        name: Its name.
        direct: Whether nobody asks for `ended`.
        first: Its first bytes, which reading returns again.
        ended: Whether its end was read.
    """

    def __init__(self, file: IO[bytes], name: str, direct: bool = False) -> None:
        self.file, self.direct = file, direct
        self.name = name
        self.ended = False
        self.first = self._ahead = b""
        self.first = self._ahead = self.read(BLOCK)

    def read(self, size: int, /) -> bytes:
        if self._ahead:
            piece, self._ahead = self._ahead[:size], self._ahead[size:]
            return piece
        piece = self.file.read(size)
        self.ended = self.ended or len(piece) < size
        return piece


class _Decompressor(Protocol):
    """What decompresses one stream; the classes of the standard library for bz2, xz and zstd are such."""

    @property
    def eof(self) -> bool:
        """Whether its end was reached."""

    @property
    def needs_input(self) -> bool:
        """Whether it has no data left to work on."""

    @property
    def unused_data(self) -> bytes:
        """What came after its end."""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Return at most so many bytes."""


class _Gzip:
    """Decompresses one gzip stream, and compares its checksum."""

    def __init__(self) -> None:
        self._one = zlib.decompressobj(zlib.MAX_WBITS | 16)

    @property
    def eof(self) -> bool:
        return self._one.eof

    @property
    def needs_input(self) -> bool:
        return not self._one.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._one.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._one.decompress(self._one.unconsumed_tail + data, max_length)


class _Unpacked(io.RawIOBase):
    """What the streams of a compressed source decompress to, one after the other; zeros between them are skipped.

    Args:
        source: The compressed bytes.
        begin: Makes the decompressor of a stream.
        errors: What it raises where the data is damaged.
    """

    def __init__(
        self, source: _Source, begin: Callable[[], _Decompressor], errors: tuple[type[Exception], ...]
    ) -> None:
        self._source, self._begin, self._errors = source, begin, errors
        self._stream = begin()
        self._data = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while True:
            if self._stream.eof and not self._next():
                return 0
            ended = False
            if not self._data and self._stream.needs_input:
                self._data = self._source.read(_PACKED_BYTES)
                ended = not self._data
            data, self._data = self._data, b""
            try:
                piece = self._stream.decompress(data, len(buffer))
            except self._errors as error:
                raise ShardCorrupt(f"{self._source.name} is damaged: {error}") from error
            if piece:
                buffer[: len(piece)] = piece
                return len(piece)
            if ended and not self._stream.eof:
                raise ShardCorrupt(f"{self._source.name} is damaged: its compressed data was cut off")

    def _next(self) -> bool:
        """Begin the next stream, if there is one."""
        rest = self._stream.unused_data
        while not (rest := rest.lstrip(b"\0")):
            if not (rest := self._source.read(_PACKED_BYTES)):
                return False
        self._data, self._stream = rest, self._begin()
        return True


class _UnpackedFrames(io.RawIOBase):
    """What the frames of a source decompress to, by the package zstandard: its own objects have no limit."""

    def __init__(self, source: _Source, package: Any) -> None:
        self._name, self._error = source.name, package.ZstdError
        self._frames = package.ZstdDecompressor().stream_reader(source, _PACKED_BYTES, read_across_frames=True)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            count: int = self._frames.readinto(buffer)
        except self._error as error:
            raise ShardCorrupt(f"{self._name} is damaged: {error}") from error
        return count


class _Format(NamedTuple):
    """A format of compressed files."""

    magic: bytes
    begin: Callable[[], _Decompressor]
    errors: tuple[type[Exception], ...]


def _xz() -> _Decompressor:
    return lzma.LZMADecompressor(memlimit=_MOST_DICTIONARY_BYTES)


_FORMATS = (
    _Format(b"\x1f\x8b", _Gzip, (zlib.error,)),
    _Format(b"BZh", bz2.BZ2Decompressor, (OSError, EOFError)),
    _Format(b"\xfd7zXZ\0", _xz, (lzma.LZMAError,)),
    _Format(b"\x5d\0\0", _xz, (lzma.LZMAError,)),
)

_ZSTD, _SKIPPED = b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"
"""How a frame begins, and, after its first byte, one that holds no data."""


def _unpacked(file: _Source) -> Forward:
    """Return what a source decompresses to."""
    first = file.first
    if not is_header(first):  # a member's name may begin like compressed data
        for magic, begin, errors in _FORMATS:
            if first.startswith(magic):
                return Forward(io.BufferedReader(_Unpacked(file, begin, errors), _UNPACKED_BYTES))
        if first.startswith(_ZSTD) or (first[1:4] == _SKIPPED and first[0] >> 4 == 5):
            return Forward(io.BufferedReader(_zstd(file), _UNPACKED_BYTES))
    return Forward(file.file, first) if file.direct and len(first) == BLOCK else Forward(file)


def _zstd(file: _Source) -> io.RawIOBase:
    for name in ("compression.zstd", "zstandard"):
        try:
            package: Any = import_module(name)
        except ImportError:
            continue
        if name == "zstandard":
            return _UnpackedFrames(file, package)
        return _Unpacked(file, package.ZstdDecompressor, (package.ZstdError,))
    raise MissingExtra("reading zstd files needs zstandard: pip install 'headrace[zstd]'")
