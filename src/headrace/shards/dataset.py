"""`TarDataset`: the samples of plain tar shards, read by number."""

import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from headrace.errors import ShardCorrupt, bad_type, bad_value, check_flag, note
from headrace.plan.blocks import WINDOW, Blocks
from headrace.shards.catalog import open_index
from headrace.shards.decoding import Decode, Decoder
from headrace.shards.fields import ABOUT, refuse_missing, slots_of
from headrace.shards.files import Files
from headrace.shards.index import CHECKED, SUM, VALUES, Index, Places, text_of
from headrace.shards.names import Shards
from headrace.shards.tar import BLOCK

_SMALL = 4096
"""The largest field that is read together with its header, in bytes: a larger one would have to be copied."""

_LARGE = 2**26
"""The largest field that is read at once with the header that says its size, in bytes."""

_MOST_PATTERNS = 1000
"""For how many combinations of fields it is remembered which of them to read."""

Raw = tuple[int, tuple[str, ...], list[Any]]
"""The number of a sample, the names of its items, and the items: bytes of fields, and perhaps key and shard."""

_Chosen = tuple[tuple[int, ...], tuple[int, ...] | None, tuple[str, ...]]
"""Which fields of a sample to read, in the order in which they lie; where each item of the sample is among them, None
if it is the same order; and the names of all items."""


class TarDataset(Dataset[Any]):
    """The samples of WebDataset's tar shards, by number. The shards stay as they are; each needs a small index.

    Members that share a name up to its first dot are the fields of a sample, by the rules of webdataset 1.0.2. With
    `shuffle=True` a loader reads in an order of `Blocks`, so that each rank reads few shards. Samples are read once a
    batch and decoded one by one, each with its own random numbers. The members of a sample must be next to each other.

    Where a shard has no index, it is made here, in this process, and written beside the shard, or into the user's cache
    folder (`XDG_CACHE_HOME`) where that is not allowed. The command `headrace index` makes indexes in parallel, and one
    manifest for many shards.

    Args:
        shards: Paths, as webdataset has them: `::` separates, `{000..127}` stands for many, `*` for those that exist.
            What is in a list is taken as it is. Or the path of a manifest (`*.index`), or another dataset's `index`.
        fields: Which fields to read: "jpg;png cls" or ("jpg;png", "cls"). Of `jpg;png` the first that a sample has is
            taken. A sample is then a tuple. None reads all; a sample is then a dict with `__key__` and `__url__`.
        decode: How to decode fields; see `Decoder`. None leaves bytes.
        transform: Called with each decoded sample; its result is the sample.
        allow_pickle: Whether to unpickle fields that are pickles. Unpickling runs whatever code the shard brings;
            without it these fields stay bytes.
        verify: Whether to compare the data of each field with the index's checksum (`headrace index --checksums`).
        streams: For the order `Blocks`: a multiple of the largest world that will read the data. None chooses.
        window: For the order `Blocks`: how many neighbouring samples of a stream are permuted together.

    Attributes:
        index: Where all samples lie.
        order: The order that `shuffle=True` takes.

    Raises:
        FileNotFoundError: A shard does not exist, or no file matches.
        OSError: A shard cannot be read.
        ShardCorrupt: A shard is no whole archive, or its index does not fit it.
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of its range, or no shard has a sample.

    Example:
        >>> dataset = TarDataset("train-{000..127}.tar", fields="jpg cls", decode="torchrgb8")
        >>> loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=8)
    """

    def __init__(
        self,
        shards: Shards | Index,
        fields: str | Sequence[str] | None = None,
        decode: Decode = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        allow_pickle: bool = False,
        verify: bool = False,
        streams: int | None = None,
        window: int = WINDOW,
    ) -> None:
        check_flag("allow_pickle", allow_pickle, default=False)
        check_flag("verify", verify, default=False)
        if transform is not None and not callable(transform):
            bad_type("transform", transform, "a callable that gets a sample", "Leave it out for samples as they are.")
        self._slots = None if fields is None else slots_of(fields)
        self._decoder = Decoder(decode, allow_pickle)
        self._transform = transform
        self._verify = verify
        self._folder = os.getcwd()  # for workers with another one
        self._files = Files()
        self._paths: dict[int, str] = {}  # by the numbers of shards
        self._chosen: dict[tuple[int, ...], _Chosen] = {}  # by the names of all fields of a sample
        self.index: Index = shards if isinstance(shards, Index) else open_index(shards)
        if not len(self.index):
            raise ValueError(f"shards={shards!r} have no sample: expected members such as '0001.jpg'.")
        if verify and SUM not in self.index.columns:
            raise ValueError(
                "verify=True is not allowed: the index has no checksums. Make it with headrace index --checksums."
            )
        for slot, known in self._preferred:
            if not known:
                bad_value("fields", slot, f"among {', '.join(self.index.names)}", "No sample has another field.")
        self.order = Blocks(self.block_sizes, streams, window)

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """The number of samples of each shard, shape (shards,)."""
        return np.array([shard.samples for shard in self.index.shards], np.int64)

    def column(self, field: str) -> NDArray[Any]:
        """Return a number for each sample from the index, shape (samples,): labels for `Balanced`, for example.

        Args:
            field: As it was given to `headrace index --column`: "cls", or "json:label".

        Raises:
            ShardCorrupt: The numbers are damaged.
            TypeError: `field` is no text.
            ValueError: The index has no such numbers.
        """
        if not isinstance(field, str):
            bad_type("field", field, "a text", "For example 'cls'.")
        found = self.index.columns.get(VALUES + field)
        if found is None:
            known = [name.removeprefix(VALUES) for name in self.index.columns if name.startswith(VALUES)]
            allowed = f"one of {known}" if known else "a field whose numbers are in the index"
            bad_value("field", field, allowed, f"Make the index with headrace index --column {field}.")
        return found

    def key(self, sample: int) -> str:
        """Return the key of a sample, such as "n01440764/10026"."""
        return self.index.key(self._number(sample))

    def shard(self, sample: int) -> str:
        """Return the name of the shard that has a sample."""
        return self.index.shard_of(self._number(sample)).name

    def __repr__(self) -> str:
        shards = self.index.shards
        named = repr(shards[0].name) + (f" and {len(shards) - 1:,} more" if len(shards) > 1 else "")
        fields = f"fields {', '.join(self.index.names if self._slots is None else self._slots)}"
        return f"TarDataset({named}: {len(self):,} samples, {fields}, decode={self._decoder.decode!r})"

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.read_many([index])[0])

    def _number(self, index: int) -> int:
        """Return a sample's number; negative ones count from the end."""
        try:
            index = operator.index(index)
        except TypeError:
            bad_type("index", index, "a whole number", f"Samples have the numbers 0 to {len(self) - 1}.")
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return index % len(self)

    def read_many(self, indices: Sequence[int]) -> list[Raw]:
        """Return the fields of samples, undecoded.

        Args:
            indices: Numbers of samples.

        Raises:
            IndexError: There is no such sample.
            TypeError: A number is no whole number.
            OSError: A shard cannot be read.
            ShardCorrupt: A shard is not as it was when it was indexed, or the index is damaged.
            ValueError: A sample has none of a field's alternatives.
        """
        last = len(self) - 1
        numbers = [index if type(index) is int and 0 <= index <= last else self._number(index) for index in indices]
        places = self.index.places(numbers)
        chosen, names = self._chosen, places.name
        of_shard: dict[int, list[tuple[int, int, _Chosen]]] = {}
        for at, (shard, first, end) in enumerate(zip(places.shard, places.first, places.first[1:], strict=False)):
            pattern = tuple(names[first:end])
            choice = chosen.get(pattern) or self._choose(pattern, numbers[at])
            of_shard.setdefault(shard, []).append((at, first, choice))
        found: list[Any] = [None] * len(numbers)
        for shard, samples in of_shard.items():
            wanted = [first + offset for _, first, (offsets, _, _) in samples for offset in offsets]
            data = self._read(shard, wanted, places, numbers)
            begin = 0
            for at, _, (offsets, arranged, called) in samples:
                end = begin + len(offsets)
                items = data[begin:end]
                found[at] = numbers[at], called, items if arranged is None else [items[one] for one in arranged]
                begin = end
        for at, name in self._about:
            values = map(text_of, places.key) if name == "__key__" else map(self._name_of_shard, places.shard)
            for (_, _, items), value in zip(found, values, strict=True):
                items.insert(at, value)
        return found

    def _read(self, number: int, wanted: list[int], places: Places, numbers: Sequence[int]) -> list[bytes]:
        """Return the data of fields of one shard.

        A small field is read together with its header, and with the header that follows it, if that is wanted, too.

        Args:
            number: The shard's.
            wanted: Which fields of `places`; those of a sample in the order in which they lie in the shard.
            places: Where the fields of the samples lie.
            numbers: The numbers of the samples, for errors.
        """
        header, size = places.header, places.size
        ranges: list[tuple[int, int]] = []
        cuts: list[tuple[int, int, int]] = []  # for each field: the range with its header, where in it, the data's size
        large: list[int] = []
        begin = following = piece = -1
        for field in wanted:
            at, length = header[field], size[field]
            end = at + CHECKED if length > _SMALL else at + BLOCK + length
            if at == following:
                ranges[piece] = begin, end - begin
            else:
                begin, piece = at, len(ranges)
                ranges.append((at, end - at))
            cuts.append((piece, at - begin, length))
            if length > _SMALL:
                following = -1
                ranges.append((at + BLOCK, length))
                if length > _LARGE:
                    large.append(field)
            else:
                following = -(-end // BLOCK) * BLOCK
        shard = self.index.shards[number]
        path = self._paths.get(number)
        if path is None:
            path = self._paths[number] = os.path.join(self._folder, shard.name)
        if large:  # no memory is asked for that only the index claims
            heads = self._files.read(path, shard.size, [(header[field], CHECKED) for field in large])
            self._compare([crc32(head) for head in heads], places.check, large, "header", places, numbers)
        pieces = self._files.read(path, shard.size, ranges)
        checks, found = [], []
        for piece, at, length in cuts:
            head = pieces[piece]
            checks.append(crc32(head[at : at + CHECKED]))
            found.append(pieces[piece + 1] if length > _SMALL else head[at + BLOCK : at + BLOCK + length])
        self._compare(checks, places.check, wanted, "header", places, numbers)
        if self._verify:
            self._compare([crc32(data) for data in found], places.sum, wanted, "data", places, numbers)
        return found

    def _compare(
        self,
        found: list[int],
        expected: list[int],
        wanted: Sequence[int],
        what: str,
        places: Places,
        numbers: Sequence[int],
    ) -> None:
        """Refuse a field whose header or data has another checksum than the index says."""
        if found == [expected[field] for field in wanted]:
            return
        field = next(field for field, sum_ in zip(wanted, found, strict=True) if sum_ != expected[field])
        sample = self._described(numbers[bisect_right(places.first, field) - 1])
        name = self.index.names[places.name[field]]
        raise ShardCorrupt(f"{sample} has changed since it was indexed, or is damaged: the {what} of {name!r} differs")

    def _compare_all(self, number: int) -> None:
        """Compare all headers of a sample, so that no damage of the index is taken for another set of fields."""
        places = self.index.places([number])
        self._read(places.shard[0], list(range(len(places.header))), places, [number])

    def _choose(self, pattern: tuple[int, ...], number: int) -> "_Chosen":
        """Return which fields of a sample to read, of one whose fields have the names of these numbers."""
        if not 0 < len(set(pattern)) == len(pattern):
            sample = self._described(number)
            raise ShardCorrupt(f"{sample} has no field by its index, or one twice. Make it again: headrace index")
        offsets = list(range(len(pattern)))
        if self._slots is not None:
            offsets = []
            for slot, alternatives in self._preferred:
                found = next((name for name in alternatives if name in pattern), None)
                if found is None:
                    self._compare_all(number)
                    refuse_missing(self._described(number), slot, (self.index.names[name] for name in pattern))
                offsets.append(pattern.index(found))
        names = [self.index.names[pattern[offset]] for offset in offsets]
        for at, name in self._about:
            names.insert(at, name)
        by_place = sorted(set(offsets))
        arranged = None if by_place == offsets else tuple(map(by_place.index, offsets))
        if len(self._chosen) == _MOST_PATTERNS:
            self._chosen.clear()
        chosen = self._chosen[pattern] = tuple(by_place), arranged, tuple(names)
        return chosen

    @cached_property
    def _about(self) -> list[tuple[int, str]]:
        """The items of a sample that are not read from the shard, each with its place."""
        return [(at, name) for at, name in enumerate(ABOUT if self._slots is None else self._slots) if name in ABOUT]

    @cached_property
    def _preferred(self) -> list[tuple[str, list[int]]]:
        """The slots that are filled from the shard, and the numbers of the names that may fill each."""
        names = {name: number for number, name in enumerate(self.index.names)}
        slots = [slot for slot in self._slots or () if slot not in ABOUT]
        return [(slot, [names[name] for name in slot.split(";") if name in names]) for slot in slots]

    def _name_of_shard(self, number: int) -> str:
        return self.index.shards[number].name

    def _described(self, number: int) -> str:
        return f"sample {self.index.key(number)!r} of {self.index.shard_of(number).name}"

    def decode(self, raw: Raw) -> Any:
        """Return the sample of what `read_many` returned for it."""
        number, names, items = raw
        if not self._decoder.leaves_all:
            items = [self._decoded(number, name, data) for name, data in zip(names, items, strict=True)]
        sample = tuple(items) if self._slots is not None else dict(zip(names, items, strict=True))
        return sample if self._transform is None else self._transform(sample)

    def _decoded(self, number: int, field: str, data: Any) -> Any:
        if field in ABOUT:
            return data
        try:
            return self._decoder(field, data)
        except Exception as error:
            note(error, f"{self._described(number)}, field {field!r}")
            raise
