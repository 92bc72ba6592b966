"""Making the index of a shard: the headers of all members are read, data only where it is asked for."""

import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.errors import ShardCorrupt
from headrace.shards.columns import Array, smallest
from headrace.shards.index import (
    CHECKED,
    OF_FIELDS,
    SUM,
    VALUES,
    Index,
    Shard,
    field_hash,
    size_hash,
    too_large,
)
from headrace.shards.samples import adjacent, samples
from headrace.shards.tar import BLOCK, Member, Skipped, members

_PIECE_BYTES = 2**12
"""How much is read at least: one read then finds the headers of small members and of what follows them."""

_LARGE_BYTES = 2**20
"""How much is read at a time where much is read."""

_NAMED = 3
"""How many keys are named in a remark."""


class _FileBytes:
    """A file's bytes, read in pieces: a part of a mapped file that is cut off meanwhile would end the process.

    Args:
        descriptor: The file.
        size: Its bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._at = 0
        self._kept = b""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: slice) -> bytes:
        """Return bytes; fewer where the file has become shorter."""
        start, stop = place.start, place.stop
        if not self._at <= start <= stop <= self._at + len(self._kept):
            self._at, self._kept = start, os.pread(self._descriptor, max(stop - start, _PIECE_BYTES), start)
        return self._kept[start - self._at : stop - self._at]


def scan(path: Path, sums: bool = False, values: Sequence[str] = (), remarks: list[str] | None = None) -> Index:
    """Return the index of a shard.

    Args:
        path: The shard, a plain tar archive.
        sums: Whether to keep a checksum of each field's data.
        values: Fields whose number to keep for each sample: "cls", or "json:label" for a number in a JSON object.
        remarks: Where to add sentences about what is in the file and not in the index.

    Raises:
        OSError: It cannot be read.
        ShardCorrupt: It is no whole tar archive, or members of a sample are not next to each other.
        ValueError: A sample has no such number.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise ShardCorrupt(f"{path} is corrupt at byte 0: it is empty")
        data, skipped = _FileBytes(file.fileno(), size), Skipped()
        index = _scanned(data, str(path), sums, values, skipped)
        if remarks is not None:
            remarks += _remarks(index, data, str(path), skipped)
        return index


def _scanned(data: _FileBytes, path: str, sums: bool, values: Sequence[str], skipped: Skipped) -> Index:
    names: dict[str, int] = {}
    hashes: dict[str, int] = {}
    keys, key_end, first = bytearray(), [], [0]
    rows: list[tuple[int, int, int, int]] = []
    data_sums: list[int] = []
    numbers: dict[str, list[int | float]] = {value: [] for value in values}
    for key, fields in adjacent(samples(members(data, path, skipped), path), path):
        key_bytes = key.encode("utf-8", "surrogateescape")
        key_hash, count = zlib.crc32(key_bytes), len(fields)
        for field, at in fields.items():
            if field not in hashes:
                hashes[field], names[field] = field_hash(field), len(names)
            check = zlib.crc32(at.head[:CHECKED]) ^ key_hash ^ hashes[field] ^ size_hash(at.size, count)
            rows.append((names[field], at.header // BLOCK, at.size, check))
            if sums:
                data_sums.append(_sum(data, at))
        for value, found in numbers.items():
            found.append(_number(data, fields, value, f"sample {key!r} of {path}"))
        keys += key_bytes
        key_end.append(len(keys))
        first.append(len(rows))
    columns = dict(zip(OF_FIELDS, np.array(rows, np.uint64).reshape(-1, 4).T, strict=True))
    columns |= {"key_end": np.array(key_end, np.uint64), "first": np.array(first, np.uint64)}
    packed = {column: smallest(array) for column, array in columns.items()}
    packed["keys"] = np.frombuffer(bytes(keys), np.uint8)
    if sums:
        packed[SUM] = np.array(data_sums, "<u4")
    for value, found in numbers.items():
        packed[VALUES + value] = _values(found, f"{value!r} of {path}")
    return Index((Shard(path, len(data), len(key_end)),), tuple(names), packed)


def _sum(data: _FileBytes, at: Member) -> int:
    """Return the CRC-32 of a member's data."""
    found, end = 0, at.start + at.size
    for start in range(at.start, end, _LARGE_BYTES):
        found = zlib.crc32(data[start : min(start + _LARGE_BYTES, end)], found)
    return found


def _remarks(index: Index, data: _FileBytes, path: str, skipped: Skipped) -> Iterator[str]:
    """Yield sentences about what a user of the shard would miss."""
    again = [key for key, times in Counter(index.keys(range(len(index)))).items() if times > 1]
    if again:
        yield f"{len(again)} keys come again later, and make samples of their own: {some(again)}"
    for what, count in sorted(skipped.others.items()):
        yield (
            f"{count} {what} are skipped: they have no data in the archive. Where they stand for files, make it "
            "again with tar --dereference --hard-dereference"
        )
    beyond = _data_after(data, skipped.end)
    if beyond < len(data):
        yield (
            f"the archive ends at byte {skipped.end}, and {_members_after(data, path, beyond)} members after that are "
            "not read. If archives were joined by cat, join them by tar --concatenate, or leave them apart; if a part "
            "of the file was overwritten by zeros, copy it again"
        )


def _data_after(data: _FileBytes, at: int) -> int:
    """Return the first block after a place that is not empty, in bytes; the data's length if there is none."""
    for start in range(at, len(data), _LARGE_BYTES):
        piece = data[start : start + _LARGE_BYTES]
        rest = piece.lstrip(b"\0")
        if rest:
            return start + (len(piece) - len(rest)) // BLOCK * BLOCK
    return len(data)


def _members_after(data: _FileBytes, path: str, at: int) -> int:
    """Count the members of the archives that begin at a place and after it, up to what is none."""
    count = 0
    while at < len(data):
        skipped = Skipped()
        try:
            for _ in members(data, path, skipped, at):
                count += 1
        except ShardCorrupt:
            break
        at = _data_after(data, skipped.end)
    return count


def some(keys: Sequence[str]) -> str:
    """Return the first of some keys, as text."""
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(map(repr, keys[:_NAMED])) + more


def _values(numbers: list[int | float], where: str) -> Array:
    """Return numbers as an array that holds all of them exactly."""
    whole = [one for one in numbers if type(one) is int]
    if len(whole) == len(numbers):
        return np.array(numbers, "<i8")
    if too_large(np.array(whole, "<i8")):
        raise ValueError(
            f"{where} has whole numbers beyond 2**53 and numbers with fractions: no array holds both exactly. Keep "
            "them in two fields, or leave this --column out."
        )
    return np.array(numbers, "<f8")


def _number(data: _FileBytes, fields: Mapping[str, Member], value: str, where: str) -> int | float:
    """Return the number that a sample has in a field, or in a JSON object in a field."""
    name, _, item = value.partition(":")
    at = fields.get(name)
    if at is None:
        raise ValueError(f"{where} has no field {name!r}: it has {', '.join(fields)}.")
    text = data[at.start : at.start + at.size]
    try:
        number = json.loads(text)[item] if item else _plain(text)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{where} has no number in {value!r}: {text[:80]!r}.") from None
    if not (-(2**63) <= number < 2**63 if isinstance(number, int) else math.isfinite(number)):
        raise ValueError(
            f"{where} has {text[:80]!r} in {value!r}: expected a number in [-2**63, 2**63), or a fraction."
        )
    return number


def _plain(text: bytes) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
