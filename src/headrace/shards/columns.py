"""Files of numbers in named columns, each with a checksum. They can be mapped, and nothing of them is unpickled."""

import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ShardCorrupt

Array = NDArray[Any]

_NAME, _VERSION, _AS_TEXT = b"headrace\x00", 3, b"\r\n\x1a\n\x00\x00"
_MAGIC = _NAME + bytes([_VERSION]) + _AS_TEXT
"""The first bytes of such a file: a name, a version, and bytes that would change if the file were copied as text."""

_HEAD = struct.Struct("<16sQ2L")
"""Magic, length of the file, length of the description, its checksum."""

_ALIGNED = 64
_MOST_DESCRIPTION_BYTES = 2**26
_KINDS = {one: np.dtype(f"<{one}") for one in ("u1", "u2", "u4", "u8", "i8", "f8")}


class Place(NamedTuple):
    """Where a column lies in its file.

    Attributes:
        dtype: The type of its numbers.
        length: How many they are.
        first: The place of its first byte.
        sum: The CRC-32 of its bytes.
    """

    dtype: np.dtype[Any]
    length: int
    first: int
    sum: int


class Columns(Mapping[str, Array]):
    """The columns of a file, which are read-only. Each is compared with its checksum when it is first read.

    Args:
        path: The file, for errors.
        whole: All bytes of the file, shape (n,).
        places: Where the columns lie in them.
        mapped: The mapping of the file that `whole` refers to; None if `whole` has the bytes themselves.
    """

    def __init__(self, path: str, whole: Array, places: dict[str, Place], mapped: mmap.mmap | None) -> None:
        self.places = places
        self._path = path
        self._whole = whole
        self._mapped = mapped
        self._compared: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        """Return a column.

        Raises:
            KeyError: There is none of this name.
            ShardCorrupt: Its bytes have another checksum.
        """
        found = self._compared.get(name)
        if found is not None:
            return found
        dtype, length, first, expected = self.places[name]
        self.check_length()
        part = self._whole[first : first + length * dtype.itemsize]
        if zlib.crc32(part.data) != expected:
            _refuse(self._path, f"is damaged: the checksum of its column {name!r} differs.")
        self._compared[name] = part.view(dtype)
        return self._compared[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def check_length(self) -> None:
        """Refuse a mapped file that has another length now: reading what is no longer there would end the process.

        Raises:
            ShardCorrupt: It has another length.
        """
        if self._mapped is not None and self._mapped.size() != len(self._whole):
            _refuse(self._path, "was overwritten while it was in use. A new index must take its place by a rename.")


def write_columns(path: Path, columns: Mapping[str, Array], about: Mapping[str, Any]) -> None:
    """Write a file in the place of another, whole or not at all.

    Args:
        path: The file.
        columns: Arrays of shape (n,) by name.
        about: More, as values that JSON has.

    Raises:
        OSError: It cannot be written; an earlier file is left as it was.
    """
    placed: dict[str, tuple[str, int, int, int]] = {}
    at = 0
    arrays = {name: np.ascontiguousarray(array, _KINDS[_kind(array)]) for name, array in columns.items()}
    for name, array in arrays.items():
        placed[name] = (_kind(array), at, len(array), zlib.crc32(array.data))
        at = _aligned(at + array.nbytes)
    text = json.dumps({"columns": placed, "about": dict(about)}, separators=(",", ":")).encode()
    start = _aligned(_HEAD.size + len(text))
    # In the same folder, so that it can take the other's name.
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(_HEAD.pack(_MAGIC, start + at, len(text), zlib.crc32(text)) + text)
            for name, array in arrays.items():
                file.seek(start + placed[name][1])
                file.write(array.data)
            file.truncate(start + at)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read_columns(path: Path, mapped: bool = True) -> tuple[Columns, dict[str, Any], int]:
    """Open a file that `write_columns` wrote.

    Args:
        path: The file.
        mapped: Whether to map it, which takes a descriptor as long as it is in use, instead of reading it.

    Returns:
        Its columns; what else it says; and the checksum of that, which covers the columns' checksums.

    Raises:
        OSError: It cannot be read.
        ShardCorrupt: It is no such file, of another version, or was cut off or changed.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise ShardCorrupt(f"{path} is no index: it is too short")
        magic, length, described, checksum = _HEAD.unpack(head)
        if magic != _MAGIC:
            _refuse_magic(path, magic)
        text = file.read(min(described, _MOST_DESCRIPTION_BYTES))
        if length != os.fstat(file.fileno()).st_size or len(text) != described or zlib.crc32(text) != checksum:
            _refuse(path, "was cut off or changed.")
        mapping = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) if mapped else None
        whole = np.frombuffer(head + text + file.read() if mapping is None else mapping, np.uint8)
    try:
        said = json.loads(text)
        start = _aligned(_HEAD.size + described)
        places = {name: _place(len(whole), start, *place) for name, place in said["columns"].items()}
        return Columns(str(path), whole, places, mapping), dict(said["about"]), checksum
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ShardCorrupt(f"{path} cannot be understood ({error!r}). Make it again: headrace index") from error


def _place(length: int, start: int, kind: str, at: int, count: int, checksum: int) -> Place:
    if any(type(number) is not int or number < 0 for number in (at, count, checksum)):
        raise ValueError("a column's place is no number")
    dtype = _KINDS[kind]
    if at % _ALIGNED or start + at + count * dtype.itemsize > length:
        raise ValueError("a column lies outside the file")
    return Place(dtype, count, start + at, checksum)


def _refuse_magic(path: Path, magic: bytes) -> NoReturn:
    version = magic[len(_NAME)]
    if magic != _NAME + bytes([version]) + _AS_TEXT:
        _refuse(path, "is no index.")
    _refuse(path, f"is an index of version {version}, and this headrace reads version {_VERSION}.")


def _refuse(path: str | Path, why: str) -> NoReturn:
    raise ShardCorrupt(f"{path} {why} Make it again: headrace index")


def smallest(values: Array) -> Array:
    """Return whole numbers >= 0 in the smallest type that holds them."""
    largest = int(values.max(initial=0))
    return values.astype(next(one for one in ("<u1", "<u2", "<u4", "<u8") if largest <= np.iinfo(one).max))


def _kind(array: Array) -> str:
    return f"{array.dtype.kind}{array.dtype.itemsize}"


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
