"""The index of shards: where each sample's fields lie, so that any sample can be read without the others."""

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self
from zlib import crc32

import numpy as np

from headrace.errors import ShardCorrupt
from headrace.shards.columns import Array, Columns, read_columns, smallest, write_columns
from headrace.shards.tar import BLOCK

OF_FIELDS = ("name", "block", "size", "check")
"""The columns with a number for each field of each sample."""

CHECKED = 345
"""How much of a header its checksum covers: name, size, type, and the device numbers, in which `ShardWriter` keeps a
checksum of the data."""

SUM = "sum"
"""The column with the CRC-32 of each field's data, where there is one."""

VALUES = "values of "
"""The prefix of the names of columns with a numeric value of each sample, such as its label."""

_WIDEST = {"keys": 1, "check": 4}
"""How many bytes the numbers of a column have at most; others have up to eight."""

_PRIME = 2**32 - 5
_MOST = 2**63 - 1


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
        check: The CRC-32 of the header's first `CHECKED` bytes, if all that the index says of the field is right.
        sum: The CRC-32 of the data; empty where the index has no checksums.
        key: Each sample's key, in bytes.
    """

    shard: list[int]
    first: list[int]
    name: list[int]
    header: list[int]
    size: list[int]
    check: list[int]
    sum: list[int]
    key: list[memoryview]


def field_hash(name: str) -> int:
    """Return the hash of a field's name. The slash, which no name has, keeps it apart from the hash of a key."""
    return crc32(f"{name}/".encode("utf-8", "surrogateescape"))


def size_hash(size: Any, fields: Any) -> Any:
    """Return the hash of a field's size and of the number of its sample's fields; both may be arrays."""
    return (size * 2**16 + fields) % _PRIME


@dataclass(frozen=True, eq=False)
class Index:
    """The samples of shards, in the shards' order.

    Attributes:
        shards: The shards.
        names: The names of all fields, such as "jpg".
        columns: Numbers, in arrays of shape (n,). For each sample the number of its first field (`first`, with one more
            at the end), and where its key ends (`key_end`) in the bytes of all keys (`keys`). For each field its place
            among `names` (`name`), the block of its header (`block`), its bytes (`size`), the CRC-32 of its header,
            of its key, and hashes of its name and size, combined by exclusive or (`check`), and perhaps the CRC-32
            of its data (`sum`). For each sample perhaps numbers from fields (`values of FIELD`).
        origin: The file that it was loaded from, the folder that names are relative to, and the checksum of the file's
            description; None if the index was made in this process.
    """

    shards: tuple[Shard, ...]
    names: tuple[str, ...]
    columns: Mapping[str, Array]
    origin: tuple[str, str, int] | None = None

    @classmethod
    def join(cls, parts: Sequence["Index"]) -> Self:
        """Return the index of all shards of several indexes, in their order.

        Checksums, and numbers from fields, are kept where all of the indexes have them.

        Raises:
            ShardCorrupt: A column of one of them is damaged.
            ValueError: Numbers from a field are whole in some shards and not in others, and too large to be joined.
        """
        names = tuple(dict.fromkeys(name for part in parts for name in part.names))
        places = {name: place for place, name in enumerate(names)}
        joined: dict[str, list[Array]] = {column: [] for column in (*OF_FIELDS, "keys", "key_end")}
        joined |= {"first": [np.zeros(1, np.uint64)]}
        common = set.intersection(*(set(part.columns) for part in parts)) - joined.keys()
        kept = [column for column in parts[0].columns if column in common]  # the same order each time
        fields = key_bytes = 0
        for part in parts:
            columns = part.columns
            moved = np.array([places[name] for name in part.names], np.uint64)
            # A number that is too large becomes another name, and so another checksum of the header.
            joined["name"].append(moved.take(columns["name"].astype(np.int64), mode="clip"))
            for column in ("block", "size", "check", "keys"):
                joined[column].append(columns[column])
            for column in kept:
                joined.setdefault(column, []).append(columns[column])
            joined["key_end"].append(columns["key_end"].astype(np.uint64) + np.uint64(key_bytes))
            joined["first"].append(columns["first"][1:].astype(np.uint64) + np.uint64(fields))
            fields += len(columns["block"])
            key_bytes += len(columns["keys"])
        whole = {
            name: _joined_values(name, arrays) if name.startswith(VALUES) else smallest(np.concatenate(arrays))
            for name, arrays in joined.items()
        }
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
    def load(cls, path: Path, folder: str | None = None, mapped: bool = True) -> Self:
        """Open an index in a file. Its columns are compared with their checksums when they are first read.

        Args:
            path: The file.
            folder: What the names of its shards are relative to; by default the file's folder.
            mapped: Whether to map the file, instead of reading it.

        Raises:
            OSError: It cannot be read.
            ShardCorrupt: It is no index, of another version, or was cut off or changed.
        """
        columns, about, checksum = read_columns(path, mapped)
        folder = os.path.dirname(path) if folder is None else folder
        try:
            shards = tuple(_shard(folder, *said) for said in about["shards"])
            names = tuple(about["names"])
            found = cls(shards, names, columns, (os.path.abspath(path), folder, checksum))
            counts = {name: place.length for name, place in columns.places.items()}
            fields, samples = counts["block"], sum(shard.samples for shard in shards)
            expected = dict.fromkeys((*OF_FIELDS, SUM), fields) | {"first": samples + 1, "keys": counts["keys"]}
            fits = all(count == expected.get(name, samples) for name, count in counts.items())
            fits &= all(place.dtype.kind == "u" or name.startswith(VALUES) for name, place in columns.places.items())
            fits &= all(isinstance(name, str) for name in names) and len(set(names)) == len(names) <= fields
            fits &= bool(names) == bool(fields)
            fits &= {*OF_FIELDS, "first", "key_end"} <= counts.keys()
            fits &= all(columns.places[name].dtype.itemsize <= most for name, most in _WIDEST.items())
        except (KeyError, TypeError, ValueError) as error:
            raise ShardCorrupt(f"{path} cannot be understood ({error!r}). Make it again: headrace index") from error
        if not fits:
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
        self._check_length()
        return [text_of(key) for key in self._keys(np.asarray(samples, np.int64))]

    def _keys(self, numbers: Array) -> list[memoryview]:
        ends, text = self.columns["key_end"], self.columns["keys"].data
        starts = np.where(numbers > 0, ends[numbers - 1], 0)
        return [text[start:end] for start, end in zip(starts.tolist(), ends[numbers].tolist(), strict=True)]

    def _check_length(self) -> None:
        """Refuse an index whose mapped file was overwritten.

        Raises:
            ShardCorrupt: It was.
        """
        if isinstance(self.columns, Columns):
            self.columns.check_length()

    @cached_property
    def _field_hashes(self) -> Array:
        """The hashes of all names, shape (names,)."""
        return np.array([field_hash(name) for name in self.names], np.int64)

    def places(self, samples: Sequence[int]) -> Places:
        """Return where the fields of samples lie, in the order in which they stand in the shard.

        Args:
            samples: Numbers of samples, each in [0, len(self)).

        Raises:
            ShardCorrupt: The index says what cannot be: a place outside of the shard.
        """
        self._check_length()
        numbers, columns = np.asarray(samples, np.int64), self.columns
        shards = self._ends.searchsorted(numbers, side="right")
        starts = columns["first"][numbers].astype(np.int64)
        counts = columns["first"][numbers + 1].astype(np.int64) - starts
        first = list(accumulate(counts.tolist(), initial=0))
        # No sample has a field twice, so that what follows is small, whatever the index says.
        if first[-1] > len(numbers) * len(self.names):
            self._contradicts(shards)
        try:
            fields = np.arange(first[-1]) + (starts - np.array(first[:-1], np.int64)).repeat(counts)
            header, size = columns["block"][fields].astype(np.int64) * BLOCK, columns["size"][fields].astype(np.int64)
            name, keys = columns["name"][fields].astype(np.int64), self._keys(numbers)
            hashes = np.array([crc32(key) for key in keys], np.int64).repeat(counts)
            hashes ^= self._field_hashes[name] ^ size_hash(size, counts.repeat(counts)) ^ columns["check"][fields]
            sums = columns[SUM][fields].tolist() if SUM in columns else []
        except (IndexError, OverflowError, ValueError):  # the number of a field or of a name, or a negative count
            self._contradicts(shards)
        beyond = size > self._sizes[shards].repeat(counts) - BLOCK - header
        headers, sizes = header.tolist(), size.tolist()
        if beyond.any() or (headers and (min(headers) < 0 or min(sizes) < 0)):
            self._contradicts(shards)
        return Places(shards.tolist(), first, name.tolist(), headers, sizes, hashes.tolist(), sums, keys)

    def _contradicts(self, shards: Array) -> NoReturn:
        names = ", ".join(self.shards[shard].name for shard in np.unique(shards)[:3].tolist())
        raise ShardCorrupt(f"the index of {names} does not fit. Make it again: headrace index")


def text_of(key: memoryview) -> str:
    """Return a key as text."""
    return str(key, "utf-8", "surrogateescape")


def _shard(folder: str, name: object, size: object, samples: object) -> Shard:
    """Return a shard that a file describes.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is out of its range.
    """
    if not isinstance(name, str) or type(size) is not int or type(samples) is not int:
        raise TypeError("a shard is no name and two numbers")
    if not name or b"\0" in os.fsencode(name) or not 0 <= size <= _MOST or not 0 <= samples <= _MOST:
        raise ValueError("a shard cannot have this name or these numbers")
    return Shard(os.path.join(folder, name), size, samples)


def _joined_values(name: str, arrays: list[Array]) -> Array:
    """Return one array of numbers from fields, which are whole in some shards and perhaps not in others.

    Raises:
        ValueError: Whole numbers would be rounded.
    """
    joined = np.concatenate(arrays)
    if joined.dtype.kind == "f" and any(array.dtype.kind != "f" and too_large(array) for array in arrays):
        raise ValueError(
            f"the {name} are whole numbers beyond 2**53 in one shard and have fractions in another: no array holds "
            "both exactly. Keep them in two fields, or leave this --column out."
        )
    return joined


def too_large(numbers: Array) -> bool:
    """Return whether an array has whole numbers that a float does not hold exactly."""
    return bool(((numbers > 2**53) | (numbers < -(2**53))).any())


def _loaded_again(path: str, folder: str, checksum: int) -> Index:
    index = Index.load(Path(path), folder)
    if index.origin != (path, folder, checksum):
        raise ShardCorrupt(f"{path} has changed since the dataset was made. Make the dataset again.")
    return index
