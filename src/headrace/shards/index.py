"""The index of shards: where each sample's fields lie, so that any sample can be read without the others."""

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from headrace.errors import ShardCorrupt
from headrace.shards.columns import Array, read_columns, smallest, write_columns
from headrace.shards.tar import BLOCK

OF_FIELDS = ("name", "block", "size", "check")
"""The columns with a number for each field of each sample."""

CHECKED = 157
"""How much of a header its checksum covers: name, size, time, type, and the tar checksum of the whole header."""

SUM = "sum"
"""The column with the CRC-32 of each field's data, where there is one."""

VALUES = "values of "
"""The prefix of the names of columns with a numeric value of each sample, such as its label."""


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


class Places(NamedTuple):
    """Where the fields of several samples lie. The lists after `first` have an item for each field.

    Attributes:
        shard: The number of each sample's shard.
        first: The number of each sample's first field in the other lists; one more at the end.
        name: The field's place among the index's names.
        header: The first byte of its member's header; the data begins one block later.
        size: The bytes of its data.
        check: The Adler-32 of the header's first `CHECKED` bytes.
        sum: The CRC-32 of the data; empty where the index has no checksums.
    """

    shard: list[int]
    first: list[int]
    name: list[int]
    header: list[int]
    size: list[int]
    check: list[int]
    sum: list[int]


@dataclass(frozen=True, eq=False)
class Index:
    """The samples of shards, in the shards' order.

    Attributes:
        shards: The shards.
        names: The names of all fields, such as "jpg".
        columns: Numbers, in arrays of shape (n,). For each sample the number of its first field (`first`, with one more
            at the end), and where its key ends (`key_end`) in the bytes of all keys (`keys`). For each field its place
            among `names` (`name`), the block of its header (`block`), its bytes (`size`), the Adler-32 of its header
            (`check`) and perhaps the CRC-32 of its data (`sum`). For each sample perhaps numbers from fields (`values
            of FIELD`).
        origin: The file that it was loaded from, the folder that names are relative to, and the checksum of the file's
            description; None if the index was made in this process.
    """

    shards: tuple[Shard, ...]
    names: tuple[str, ...]
    columns: dict[str, Array]
    origin: tuple[str, str, int] | None = None

    @classmethod
    def join(cls, parts: Sequence["Index"]) -> Self:
        """Return the index of all shards of several indexes, in their order.

        Checksums, and numbers from fields, are kept where all of the indexes have them.
        """
        names = tuple(dict.fromkeys(name for part in parts for name in part.names))
        places = {name: place for place, name in enumerate(names)}
        joined: dict[str, list[Array]] = {column: [] for column in (*OF_FIELDS, "keys", "key_end")}
        joined |= {"first": [np.zeros(1, np.uint64)]}
        kept = set.intersection(*(set(part.columns) for part in parts)) - joined.keys()
        fields = key_bytes = 0
        for part in parts:
            columns = part.columns
            moved = np.array([places[name] for name in part.names], np.uint64)
            joined["name"].append(moved[columns["name"]] if len(moved) else columns["name"])
            for column in ("block", "size", "check", "keys"):
                joined[column].append(columns[column])
            for column in kept:
                joined.setdefault(column, []).append(columns[column])
            joined["key_end"].append(columns["key_end"].astype(np.uint64) + np.uint64(key_bytes))
            joined["first"].append(columns["first"][1:].astype(np.uint64) + np.uint64(fields))
            fields += len(columns["block"])
            key_bytes += len(columns["keys"])
        whole = {column: np.concatenate(arrays) for column, arrays in joined.items()}
        whole = {name: array if name.startswith(VALUES) else smallest(array) for name, array in whole.items()}
        return cls(tuple(shard for part in parts for shard in part.shards), names, whole)

    def save(self, path: Path) -> None:
        """Write it in the place of another, whole or not at all. It may be moved together with shards in its folder.

        Raises:
            OSError: It cannot be written.
        """
        folder = os.path.abspath(path.parent) + os.sep
        shards = [shard._replace(name=os.path.abspath(shard.name).removeprefix(folder)) for shard in self.shards]
        write_columns(path, self.columns, {"shards": shards, "names": self.names})

    @classmethod
    def load(cls, path: Path, folder: str | None = None) -> Self:
        """Map an index from a file.

        Args:
            path: The file.
            folder: What the names of its shards are relative to; by default the file's folder.

        Raises:
            OSError: It cannot be read.
            ShardCorrupt: It is no index, of another version, or was cut off or changed.
        """
        columns, about, checksum = read_columns(path)
        folder = os.path.dirname(path) if folder is None else folder
        try:
            shards = tuple(
                Shard(os.path.join(folder, name), int(size), int(count)) for name, size, count in about["shards"]
            )
            found = cls(shards, tuple(map(str, about["names"])), columns, (os.path.abspath(path), folder, checksum))
            fields, samples = len(columns["block"]), sum(shard.samples for shard in shards)
            expected = dict.fromkeys((*OF_FIELDS, SUM), fields) | {"first": samples + 1, "keys": len(columns["keys"])}
            fits = all(len(columns[name]) == expected[name] for name in (*OF_FIELDS, "first"))
            fits &= all(len(column) == expected.get(name, samples) for name, column in columns.items())
        except (KeyError, TypeError, ValueError) as error:
            raise ShardCorrupt(f"{path} cannot be understood ({error!r}). Make it again: headrace index") from error
        if not fits or any(shard.samples < 0 or shard.size < 0 for shard in shards):
            raise ShardCorrupt(f"{path} contradicts itself. Make it again: headrace index")
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """A mapped index is mapped again by the process that gets it: only the name of its file travels."""
        if self.origin is None:
            return Index, (self.shards, self.names, self.columns)
        return _loaded_again, self.origin

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @cached_property
    def _ends(self) -> Array:
        """The number of samples up to the end of each shard."""
        return np.cumsum([shard.samples for shard in self.shards], dtype=np.int64)

    @cached_property
    def _end_of_shard(self) -> list[int]:
        """The same numbers: a list is searched for one sample in a tenth of the time."""
        found: list[int] = self._ends.tolist()
        return found

    @cached_property
    def _sizes(self) -> Array:
        """The bytes of each shard."""
        return np.array([shard.size for shard in self.shards], np.int64)

    def shard_of(self, sample: int) -> Shard:
        """Return the shard that has a sample, in [0, len(self))."""
        return self.shards[bisect_right(self._end_of_shard, sample)]

    def key(self, sample: int) -> str:
        """Return the key of a sample, in [0, len(self))."""
        return self.keys([sample])[0]

    def keys(self, samples: Sequence[int]) -> list[str]:
        """Return the keys of samples, each in [0, len(self))."""
        numbers, ends, text = np.asarray(samples, np.int64), self.columns["key_end"], self.columns["keys"].data
        starts = np.where(numbers > 0, ends[numbers - 1], 0)
        pairs = zip(starts.tolist(), ends[numbers].tolist(), strict=True)
        return [str(text[start:end], "utf-8", "surrogateescape") for start, end in pairs]

    def places(self, samples: Sequence[int]) -> Places:
        """Return where the fields of samples lie, in the order in which they stand in the shard.

        Args:
            samples: Numbers of samples, each in [0, len(self)).

        Raises:
            ShardCorrupt: The index says what cannot be: a place outside of the shard.
        """
        numbers, columns = np.asarray(samples, np.int64), self.columns
        shards = self._ends.searchsorted(numbers, side="right")
        starts = columns["first"][numbers].astype(np.int64)
        counts = columns["first"][numbers + 1].astype(np.int64) - starts
        first = np.zeros(len(numbers) + 1, np.int64)
        counts.cumsum(out=first[1:])
        if counts.min(initial=0) < 0 or first[-1] > len(columns["block"]):
            self._contradicts(shards[0])
        fields = np.arange(first[-1]) + (starts - first[:-1]).repeat(counts)
        if len(fields) and not 0 <= fields.min() <= fields.max() < len(columns["block"]):
            self._contradicts(shards[0])
        header = columns["block"][fields].astype(np.int64) * BLOCK
        size, name = columns["size"][fields].astype(np.int64), columns["name"][fields]
        beyond = header + BLOCK + size > self._sizes[shards].repeat(counts)
        beyond |= (header < 0) | (size < 0) | (name >= len(self.names))
        if beyond.any():
            self._contradicts(shards.repeat(counts)[beyond][0])
        sums = columns[SUM][fields].tolist() if SUM in columns else []
        check = columns["check"][fields].tolist()
        return Places(shards.tolist(), first.tolist(), name.tolist(), header.tolist(), size.tolist(), check, sums)

    def _contradicts(self, shard: int) -> None:
        raise ShardCorrupt(f"the index of {self.shards[shard].name} does not fit it. Make it again: headrace index")


def _loaded_again(path: str, folder: str, checksum: int) -> Index:
    index = Index.load(Path(path), folder)
    if index.origin != (path, folder, checksum):
        raise ShardCorrupt(f"{path} has changed since the dataset was made. Make the dataset again.")
    return index
