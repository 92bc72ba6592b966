"""Tar archives: where the data of each member lies. Headers are read, data is not.

Source: POSIX.1-2008, pax interchange format; GNU tar manual, "Basic Tar Format".
"""

import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, Protocol

from headrace.errors import ShardCorrupt

BLOCK = 512
"""Headers and data begin at multiples of this, in bytes."""

_MOST_EXTENSION_BYTES = 2**20
"""The largest long name or pax header that is read, and the most that several may hold together, in bytes."""

_HEADER = struct.Struct("100s24x12s12x8sc100x6s82x155s12x")
"""What is read of a header: name, size, checksum, type, magic, and what comes before the name."""

_CHECKSUM = slice(148, 156)
_EMPTY = bytes(BLOCK)

_CUT_OFF = "it ends without the two empty blocks of a whole archive: it was cut off"

_REGULAR = b"0\0007"
"""The types of regular members: as such, of old archives, and contiguous ones, which are the same."""

_OTHERS = {b"1": "links", b"2": "links", b"3": "devices", b"4": "devices", b"6": "fifos"}
"""What members without data are called; folders, which do not count, are b"5"."""

_GNU_NAME, _GNU_LINK, _PAX, _PAX_GLOBAL, _SPARSE = b"L", b"K", b"x", b"g", b"S"


class Member(NamedTuple):
    """A regular member of an archive.

    Attributes:
        name: Its whole name.
        header: Where the header that comes right before the data begins, in bytes.
        start: Where its data begins, in bytes.
        size: The bytes of its data.
        head: The header itself.
    """

    name: str
    header: int
    start: int
    size: int
    head: bytes | memoryview


class Bytes(Protocol):
    """An archive's bytes: a mapped file, or a file that is read forward, whose slices follow each other."""

    def __len__(self) -> int:
        """Return the number of bytes, or more where it is not known."""

    def __getitem__(self, place: slice, /) -> bytes | memoryview:
        """Return bytes; fewer at the end."""


@dataclass
class Skipped:
    """What `members` found and did not yield.

    Attributes:
        others: How many members are no regular ones, by what they are; folders do not count.
        end: The first byte after the archive's two empty blocks.
    """

    others: Counter[str] = field(default_factory=Counter)
    end: int = 0


def members(data: Bytes, where: str, skipped: Skipped | None = None, at: int = 0) -> Iterator[Member]:
    """Yield the regular members of an archive, in their order; others are skipped.

    Args:
        data: The whole archive.
        where: Its name, for errors.
        skipped: Where to note what is not yielded.
        at: Where the archive begins in the data, in bytes.

    Raises:
        ShardCorrupt: It is no tar archive, or ends before its two empty blocks, or has a sparse member.
    """
    length = len(data)
    extended: dict[str, bytes] = {}  # what extension headers say of the next member
    shared: dict[str, bytes] = {}  # what they say of all that follow
    while True:
        if at + BLOCK > length:
            _corrupt(where, at, _CUT_OFF)
        header = data[at : at + BLOCK]
        if len(header) < BLOCK:
            _corrupt(where, at, _CUT_OFF)
        if header[0] == 0 and header == _EMPTY:
            if at + 2 * BLOCK > length:
                _corrupt(where, at, _CUT_OFF)
            if data[at + BLOCK : at + 2 * BLOCK] != _EMPTY:
                _corrupt(where, at, "an empty block stands where a member should begin")
            if extended:
                _corrupt(where, at, "the last extension header belongs to no member")
            if skipped is not None:
                skipped.end = at + 2 * BLOCK
            return
        short_name, octal_size, octal_sum, kind, magic, prefix = _HEADER.unpack(header)
        if _number(octal_sum) != checksum(header):
            _corrupt(where, at, "the checksum of a member's header is wrong")
        size, start = _number(octal_size), at + BLOCK
        if kind in (_PAX, _PAX_GLOBAL, _GNU_NAME, _GNU_LINK):
            content = _extension(data, start, size, where)
            if kind == _GNU_NAME:
                extended["path"] = content.partition(b"\0")[0]
            elif kind != _GNU_LINK:
                _add_records(shared if kind == _PAX_GLOBAL else extended, content, where, at)
            at = start + _whole(size)
            continue
        said = shared | extended if shared or extended else {}
        if "size" in said:
            size = _decimal(said["size"], where, at)
        if size < 0:
            _corrupt(where, at, "the size of a member is no number")
        if kind == _SPARSE or (said and any(one.startswith("GNU.sparse.") for one in said)):
            _corrupt(where, at, "it has a sparse member, whose data does not lie in one piece")
        if kind not in _REGULAR:  # links, devices and folders have no data, whatever their size says
            size = size if kind > b"7" else 0
            if skipped is not None and kind != b"5":
                skipped.others[_OTHERS.get(kind, "members of unknown types")] += 1
        if start + size > length:
            _corrupt(where, at, f"a member of {size} bytes does not fit into what is left: it was cut off")
        if kind in _REGULAR:
            name = _name(said.get("path"), short_name, prefix if magic == b"ustar\0" else b"\0")
            if not (kind == b"\0" and name.endswith("/")):  # a folder of an old archive
                yield Member(name.rstrip("/") if "path" in said else name, at, start, size, header)
        extended.clear()
        at = start + _whole(size)


def _name(extended: bytes | None, short: bytes, prefix: bytes) -> str:
    """Return a member's name, from extension headers or from its own."""
    path = short.partition(b"\0")[0] if extended is None else extended
    if prefix[0] and extended is None:
        path = prefix.partition(b"\0")[0] + b"/" + path
    return path.decode("utf-8", "surrogateescape")


def is_header(block: memoryview | bytes) -> bool:
    """Tell whether bytes are a member's header, by its checksum."""
    return len(block) == BLOCK and _number(bytes(block[_CHECKSUM])) == checksum(block)


def checksum(header: memoryview | bytes) -> int:
    """Return the checksum that a header should have: the sum of its bytes, those of the checksum taken as spaces."""
    half = BLOCK // 2
    return _sum(header[:half]) + _sum(header[half:]) - _sum(header[_CHECKSUM]) + 8 * ord(" ")


def _sum(part: memoryview | bytes) -> int:
    """Return the sum of at most 256 bytes. One plus the sum, less than 65,521, is the low half of an Adler-32."""
    return (zlib.adler32(part) & 0xFFFF) - 1


def _number(field: bytes) -> int:
    """Return a number of a header, octal or binary; -1 if it is none."""
    if field[0] & 0x80:
        negative = bool(field[0] & 0x40)
        return -1 if negative else int.from_bytes(bytes([field[0] & 0x3F]) + field[1:])
    text = field.partition(b"\0")[0].strip()
    try:
        return int(text, 8) if text.isdigit() else -1 if text else 0
    except ValueError:
        return -1


def _whole(size: int) -> int:
    """Return a size rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def _extension(data: Bytes, start: int, size: int, where: str) -> bytes:
    if not 0 <= size <= _MOST_EXTENSION_BYTES:
        _corrupt(where, start - BLOCK, f"an extension header of {size} bytes is larger than {_MOST_EXTENSION_BYTES}")
    content = bytes(data[start : start + size])
    if len(content) < size:
        _corrupt(where, start - BLOCK, "an extension header does not fit into what is left: it was cut off")
    return content


def _add_records(records: dict[str, bytes], content: bytes, where: str, at: int) -> None:
    """Add the records of a pax header to earlier ones."""
    records.update(_records(content, where, at))
    if sum(len(name) + len(value) for name, value in records.items()) > _MOST_EXTENSION_BYTES:
        _corrupt(where, at, f"extension headers hold more than {_MOST_EXTENSION_BYTES} bytes together")


def _records(content: bytes, where: str, at: int) -> dict[str, bytes]:
    """Return the records of a pax header, each a line `LENGTH KEYWORD=VALUE`, its length counting the whole line."""
    records: dict[str, bytes] = {}
    place = 0
    while place < len(content) and content[place]:
        head, space, _ = content[place : place + 20].partition(b" ")
        length = int(head) if space and head.isdigit() else 0
        line = content[place : place + length]
        keyword, equals, value = line[len(head) + 1 : -1].partition(b"=")
        if len(line) != length or not equals or not line.endswith(b"\n"):
            _corrupt(where, at, "a pax header cannot be read")
        records[keyword.decode("utf-8", "replace")] = value
        place += length
    return records


def _decimal(value: bytes, where: str, at: int) -> int:
    if not value.isdigit() or len(value) > 18:
        _corrupt(where, at, "the size in a pax header is no number")
    return int(value)


def _corrupt(where: str, at: int, why: str) -> NoReturn:
    raise ShardCorrupt(f"{where} is corrupt at byte {at}: {why}")
