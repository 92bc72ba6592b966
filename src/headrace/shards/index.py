"""The index of shards: where each sample's fields lie, so that any sample can be read without the others."""

import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from headrace.errors import ShardCorrupt
from headrace.shards.columns import Array, read_columns, smallest, write_columns
from headrace.shards.samples import samples
from headrace.shards.tar import BLOCK, members

_OF_FIELDS = ("name", "block", "size", "check")
"""The columns with a number for each field of each sample."""


class Shard(NamedTuple):
    """A shard as it was when it was indexed.

    Attributes:
        name: Its path, as it was given.
        size: Its bytes.
        samples: How many samples it has.
    """

    name: str
    size: int
    samples: int


class Field(NamedTuple):
    """Where a field of a sample lies in its shard.

    Attributes:
        header: The first byte of its member's header; the data begins one block later.
        size: The bytes of its data.
        check: The CRC-32 of the header.
    """

    header: int
    size: int
    check: int

    @property
    def start(self) -> int:
        """The first byte of its data."""
        return self.header + BLOCK


@dataclass(frozen=True, eq=False)
class Index:
    """The samples of shards, in the shards' order.

    Attributes:
        shards: The shards.
        names: The names of all fields, such as "jpg".
        columns: Numbers: for each sample the number of its first field (`first`, with one more at the end), and where
            its key ends (`key_end`) in the bytes of all keys (`keys`); for each field its place among `names` (`name`),
            the block of its header (`block`), its bytes (`size`), and its header's CRC-32 (`check`).
    """

    shards: tuple[Shard, ...]
    names: tuple[str, ...]
    columns: dict[str, Array]

    @classmethod
    def scan(cls, path: Path, name: str | None = None) -> Self:
        """Read the headers of a shard.

        Args:
            path: The shard, a plain tar archive.
            name: Its name in the index; by default the path.

        Raises:
            OSError: It cannot be read.
            ShardCorrupt: It is no whole tar archive.
        """
        name = str(path) if name is None else name
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise ShardCorrupt(f"{name} is corrupt at byte 0: it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
                names: dict[str, int] = {}
                keys, key_end, first = bytearray(), [], [0]
                rows: list[tuple[int, int, int, int]] = []
                for key, fields in samples(members(data, name), name):
                    for field, at in fields.items():
                        check = zlib.crc32(data[at.header : at.header + BLOCK])
                        rows.append((names.setdefault(field, len(names)), at.header // BLOCK, at.size, check))
                    keys += key.encode("utf-8", "surrogateescape")
                    key_end.append(len(keys))
                    first.append(len(rows))
        columns = dict(zip(_OF_FIELDS, np.array(rows, np.uint64).reshape(-1, 4).T, strict=True))
        columns |= {"key_end": np.array(key_end, np.uint64), "first": np.array(first, np.uint64)}
        packed = {column: smallest(values) for column, values in columns.items()}
        packed["keys"] = np.frombuffer(bytes(keys), np.uint8)
        return cls((Shard(name, size, len(key_end)),), tuple(names), packed)

    @classmethod
    def join(cls, parts: Sequence["Index"]) -> Self:
        """Return the index of all shards of several indexes, in their order."""
        names = tuple(dict.fromkeys(name for part in parts for name in part.names))
        places = {name: place for place, name in enumerate(names)}
        joined: dict[str, list[Array]] = {
            column: [] for column in ("name", "block", "size", "check", "keys", "key_end")
        }
        joined["first"] = [np.zeros(1, np.uint64)]
        fields = key_bytes = 0
        for part in parts:
            columns = part.columns
            moved = np.array([places[name] for name in part.names], np.uint64)
            joined["name"].append(moved[columns["name"]] if len(moved) else columns["name"])
            for column in ("block", "size", "check", "keys"):
                joined[column].append(columns[column])
            joined["key_end"].append(columns["key_end"].astype(np.uint64) + np.uint64(key_bytes))
            joined["first"].append(columns["first"][1:].astype(np.uint64) + np.uint64(fields))
            fields += len(columns["block"])
            key_bytes += len(columns["keys"])
        whole = {column: smallest(np.concatenate(arrays)) for column, arrays in joined.items() if arrays}
        return cls(tuple(shard for part in parts for shard in part.shards), names, whole)

    def save(self, path: Path) -> None:
        """Write it in the place of another, whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        write_columns(path, self.columns, {"shards": self.shards, "names": self.names})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Map an index from a file.

        Raises:
            OSError: It cannot be read.
            ShardCorrupt: It is no index, of another version, or was cut off or changed.
        """
        columns, about = read_columns(path)
        try:
            shards = tuple(Shard(str(name), int(size), int(count)) for name, size, count in about["shards"])
            found = cls(shards, tuple(map(str, about["names"])), columns)
            lengths = {
                column: len(columns[column]) for column in ("name", "block", "size", "check", "first", "key_end")
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ShardCorrupt(f"{path} cannot be understood ({error!r}). Make it again: headrace index") from error
        fields, count = lengths["block"], sum(shard.samples for shard in shards)
        expected = dict.fromkeys(_OF_FIELDS, fields) | {"first": count + 1, "key_end": count}
        if lengths != expected or any(shard.samples < 0 for shard in shards):
            raise ShardCorrupt(f"{path} contradicts itself. Make it again: headrace index")
        return found

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @cached_property
    def _ends(self) -> Array:
        """The number of samples up to the end of each shard."""
        return np.cumsum([shard.samples for shard in self.shards], dtype=np.int64)

    def shard_of(self, sample: int) -> int:
        """Return the number of the shard that has a sample, in [0, len(self))."""
        return int(np.searchsorted(self._ends, sample, side="right"))

    def key(self, sample: int) -> str:
        """Return a sample's key."""
        ends = self.columns["key_end"]
        text = self.columns["keys"][int(ends[sample - 1]) if sample else 0 : int(ends[sample])]
        return text.tobytes().decode("utf-8", "surrogateescape")

    def fields(self, sample: int) -> dict[str, Field]:
        """Return where the fields of a sample lie, in the shard's order.

        Raises:
            ShardCorrupt: The index says what cannot be: a place outside of the shard.
        """
        return dict(self._fields(sample))

    def _fields(self, sample: int) -> Iterator[tuple[str, Field]]:
        columns, shard = self.columns, self.shards[self.shard_of(sample)]
        first, last = int(columns["first"][sample]), int(columns["first"][sample + 1])
        for number in range(first, last):
            name, header = int(columns["name"][number]), int(columns["block"][number]) * BLOCK
            found = Field(header, int(columns["size"][number]), int(columns["check"][number]))
            if name >= len(self.names) or found.start + found.size > shard.size:
                raise ShardCorrupt(f"the index of {shard.name} does not fit it. Make it again: headrace index")
            yield self.names[name], found
