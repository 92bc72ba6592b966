"""Files of numbers in named columns, mapped rather than read: nothing of them is unpickled."""

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ShardCorrupt

Array = NDArray[Any]

_MAGIC = b"headrace\x00\x02\r\n\x1a\n\x00\x00"
"""The first bytes of such a file: a name, a version, and bytes that would change if the file were copied as text."""

_HEAD = struct.Struct("<16sQ2L")
"""Magic, length of the file, length of the description, its checksum."""

_ALIGNED = 64
_MOST_DESCRIPTION_BYTES = 2**26
_KINDS = {one: np.dtype(f"<{one}") for one in ("u1", "u2", "u4", "u8", "i8", "f8")}


def write_columns(path: Path, columns: Mapping[str, Array], about: Mapping[str, Any]) -> None:
    """Write a file in the place of another, whole or not at all.

    Args:
        path: The file.
        columns: Arrays of shape (n,) by name.
        about: More, as values that JSON has.

    Raises:
        OSError: It cannot be written; an earlier file is left as it was.
    """
    placed: dict[str, tuple[str, int, int]] = {}
    at = 0
    arrays = {name: np.ascontiguousarray(array, _KINDS[_kind(array)]) for name, array in columns.items()}
    for name, array in arrays.items():
        placed[name] = (_kind(array), at, len(array))
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


def read_columns(path: Path) -> tuple[dict[str, Array], dict[str, Any], int]:
    """Map a file that `write_columns` wrote.

    Returns:
        Its columns, which are read-only; what else it says; and the checksum of all but the columns' data.

    Raises:
        OSError: It cannot be read.
        ShardCorrupt: It is no such file, of another version, or was cut off or changed.
    """
    if path.stat().st_size < _HEAD.size:
        raise ShardCorrupt(f"{path} is no index: it is too short")
    whole = np.asarray(np.memmap(path, np.uint8, "r"))  # plain arrays are sliced in a tenth of the time
    magic, length, described, checksum = _HEAD.unpack(whole[: _HEAD.size].tobytes())
    if magic != _MAGIC:
        raise ShardCorrupt(f"{path} is no index of this version of headrace. Make it again: headrace index")
    text = whole[_HEAD.size : _HEAD.size + min(described, _MOST_DESCRIPTION_BYTES)].tobytes()
    if length != len(whole) or len(text) != described or zlib.crc32(text) != checksum:
        raise ShardCorrupt(f"{path} was cut off or changed. Make it again: headrace index")
    try:
        said = json.loads(text)
        start = _aligned(_HEAD.size + described)
        columns = {name: _column(whole, start, *place) for name, place in said["columns"].items()}
        return columns, dict(said["about"]), checksum
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ShardCorrupt(f"{path} cannot be understood ({error!r}). Make it again: headrace index") from error


def _column(whole: Array, start: int, kind: str, at: int, count: int) -> Array:
    dtype = _KINDS[kind]
    first, last = start + at, start + at + count * dtype.itemsize
    if at < 0 or at % _ALIGNED or count < 0 or last > len(whole):
        raise ValueError("a column lies outside the file")
    return whole[first:last].view(dtype)


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
