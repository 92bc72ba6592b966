"""Making the index of a shard: the headers of all members are read, data only where it is asked for."""

import json
import math
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace.errors import ShardCorrupt
from headrace.shards.columns import smallest
from headrace.shards.index import CHECKED, OF_FIELDS, SUM, VALUES, Index, Shard
from headrace.shards.samples import samples
from headrace.shards.tar import BLOCK, Member, members


def scan(path: Path, sums: bool = False, values: Sequence[str] = ()) -> Index:
    """Return the index of a shard.

    Args:
        path: The shard, a plain tar archive.
        sums: Whether to keep a checksum of each field's data.
        values: Fields whose number to keep for each sample: "cls", or "json:label" for a number in a JSON object.

    Raises:
        OSError: It cannot be read.
        ShardCorrupt: It is no whole tar archive.
        ValueError: A sample has no such number.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise ShardCorrupt(f"{path} is corrupt at byte 0: it is empty")
        # It is unmapped when it is dropped: the traceback of an error has frames that still refer to parts of it.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return _scanned(memoryview(mapped), str(path), sums, values)


def _scanned(data: memoryview, path: str, sums: bool, values: Sequence[str]) -> Index:
    names: dict[str, int] = {}
    keys, key_end, first = bytearray(), [], [0]
    rows: list[tuple[int, int, int, int]] = []
    data_sums: list[int] = []
    numbers: dict[str, list[int | float]] = {value: [] for value in values}
    for key, fields in samples(members(data, path), path):
        for field, at in fields.items():
            check = zlib.adler32(data[at.header : at.header + CHECKED])
            rows.append((names.setdefault(field, len(names)), at.header // BLOCK, at.size, check))
            if sums:
                data_sums.append(zlib.crc32(data[at.start : at.start + at.size]))
        for value, found in numbers.items():
            found.append(_number(data, fields, value, f"sample {key!r} of {path}"))
        keys += key.encode("utf-8", "surrogateescape")
        key_end.append(len(keys))
        first.append(len(rows))
    columns = dict(zip(OF_FIELDS, np.array(rows, np.uint64).reshape(-1, 4).T, strict=True))
    columns |= {"key_end": np.array(key_end, np.uint64), "first": np.array(first, np.uint64)}
    packed = {column: smallest(array) for column, array in columns.items()}
    packed["keys"] = np.frombuffer(bytes(keys), np.uint8)
    if sums:
        packed[SUM] = np.array(data_sums, "<u4")
    for value, found in numbers.items():
        packed[VALUES + value] = np.array(found, "<i8" if all(type(one) is int for one in found) else "<f8")
    return Index((Shard(path, len(data), len(key_end)),), tuple(names), packed)


def _number(data: memoryview, fields: Mapping[str, Member], value: str, where: str) -> int | float:
    """Return the number that a sample has in a field, or in a JSON object in a field."""
    name, _, item = value.partition(":")
    at = fields.get(name)
    if at is None:
        raise ValueError(f"{where} has no field {name!r}: it has {', '.join(fields)}.")
    text = bytes(data[at.start : at.start + at.size])
    try:
        number = json.loads(text)[item] if item else _plain(text)
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise TypeError
        if abs(number) >= 2**63:
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{where} has no number in {value!r}: {text[:80]!r}.") from None
    return number


def _plain(text: bytes) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
