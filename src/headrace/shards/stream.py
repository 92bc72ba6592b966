"""`TarStream`: tar shards that can only be read forward."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from headrace.errors import ShardCorrupt, bad_type, bad_value, check_flag, note, whole_number
from headrace.plan.keys import key
from headrace.shards.decoding import Decode, Decoder
from headrace.shards.fields import ABOUT, chosen, refuse_missing, slots_of
from headrace.shards.names import COMMAND, Shards, shard_names
from headrace.shards.samples import samples
from headrace.shards.sources import STANDARD_INPUT, Forward, opened
from headrace.shards.tar import members
from headrace.system.world import resolve


class _Loaded(NamedTuple):
    """A member with its data."""

    name: str
    header: int
    data: bytes


class TarStream(IterableDataset[Any]):
    """The samples of WebDataset's tar shards, read forward: for archives without an index.

    These are compressed archives, standard input (`-`) and the output of commands. For plain tar files `TarDataset` is
    better: it shuffles all samples, gives ranks equal shares, and resumes at once.

    Shards are dealt over the ranks, and each rank's over its workers. Where there are fewer shards than workers in all
    ranks together, each worker reads all shards and keeps its share of the samples; a warning says so. The order
    follows from the seed and the epoch alone. A loader with `seed=` sets the epoch; otherwise call `loader.set_epoch`
    before each epoch, or all epochs are alike. A loader resumes by reading again up to its place.

    Args:
        shards: Paths, as for `TarDataset`, also of compressed archives: `.gz`, `.tgz`, `.bz2`, `.xz`, `.zst`.
        fields: Which fields to use, as for `TarDataset`.
        decode: How to decode fields, as for `TarDataset`.
        transform: Called with each decoded sample; its result is the sample.
        shuffle: How many samples a buffer holds, from which each next sample is drawn. Shards are permuted, too. 0
            reads in order.
        seed: Of the order.
        epoch_samples: The samples of an epoch over all ranks and workers together, >= 1. Shards are read again, in
            another order, where they have fewer. None: each shard once; then ranks may have different numbers of
            samples.
        resampled: Whether each next shard is drawn from all, so that an epoch may read some often and others never. It
            needs `epoch_samples`.
        allow_commands: Whether `pipe:` sources may run shell commands.
        allow_pickle: Whether to unpickle fields that are pickles, as for `TarDataset`.

    Raises:
        FileNotFoundError: No file matches.
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of its range.

    Example:
        >>> dataset = TarStream("train-{000..127}.tar.gz", "jpg cls", "torchrgb8", shuffle=1000)
        >>> loader = DataLoader(dataset, batch_size=64, num_workers=8, seed=0)
    """

    def __init__(
        self,
        shards: Shards,
        fields: str | Sequence[str] | None = None,
        decode: Decode = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        shuffle: int = 0,
        seed: int = 0,
        epoch_samples: int | None = None,
        resampled: bool = False,
        allow_commands: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        for name, flag in (
            ("resampled", resampled),
            ("allow_commands", allow_commands),
            ("allow_pickle", allow_pickle),
        ):
            check_flag(name, flag, default=False)
        if transform is not None and not callable(transform):
            bad_type("transform", transform, "a callable that gets a sample", "Leave it out for samples as they are.")
        self._slots = None if fields is None else slots_of(fields)
        self._decoder = Decoder(decode, allow_pickle)
        self._transform = transform
        self._shuffle = whole_number("shuffle", shuffle)
        self._seed = whole_number("seed", seed, high=2**63 - 1)
        self._samples = None if epoch_samples is None else whole_number("epoch_samples", epoch_samples, low=1)
        self._resampled = resampled
        if resampled and epoch_samples is None:
            bad_value("resampled", True, "False without epoch_samples", "Say how many samples an epoch has.")
        self._folder = os.getcwd()  # for workers with another one
        self._epoch = 0
        self.shards = shard_names(shards)
        commands = [shard for shard in self.shards if shard.startswith(COMMAND)]
        if commands and not allow_commands:
            raise ValueError(f"shard {commands[0]!r} is a shell command. If you trust it, pass allow_commands=True.")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which the order depends on."""
        self._epoch = whole_number("epoch", epoch)

    def __len__(self) -> int:
        """Return this rank's samples in an epoch.

        Raises:
            TypeError: There is no `epoch_samples`: nobody has counted them.
        """
        if self._samples is None:
            raise TypeError("a TarStream without epoch_samples has no length: its samples have not been counted")
        world = resolve(None)
        return _share(self._samples, world.rank, world.size)

    def __iter__(self) -> Iterator[Any]:
        world, info = resolve(None), get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        reader = _Reader(world.rank, world.size, worker, workers)
        found = self._found(reader)
        if self._shuffle:
            # Keyed by the reader: another buffer holds other samples.
            draw = _generator("stream buffer", self._seed, self._epoch, reader.number)
            found = _shuffled(found, self._shuffle, draw)
        if self._samples is not None:
            mine = _share(self._samples, world.rank, world.size)
            found = islice(found, _share(mine, worker, workers))
        for shard, name, fields in found:
            yield self._sample(shard, name, fields)

    def _found(self, reader: "_Reader") -> Iterator[tuple[str, str, dict[str, bytes]]]:
        """Yield this reader's samples, undecoded: the shard, the key and the fields."""
        by_sample = len(self.shards) < reader.all and not self._resampled
        if by_sample and reader.number == 0:
            warnings.warn(
                f"{len(self.shards)} shards are fewer than {reader.all} workers of all ranks: each of them reads all "
                "shards and keeps its share of the samples. Use fewer workers, or TarDataset, which splits by sample.",
                stacklevel=2,
            )
        read = 0
        for shards in self._passes(reader, by_sample):
            before = read
            for shard in shards:
                for place, (name, fields) in enumerate(self._read(shard)):
                    if not by_sample or place % reader.all == reader.number:
                        read += 1
                        yield shard, name, fields
            if read == before and self._samples is not None:
                raise ValueError(f"shards {shards!r} have no sample for worker {reader.number} of {reader.all}")

    def _passes(self, reader: "_Reader", by_sample: bool) -> Iterator[Iterable[str]]:
        """Yield the shards of this reader, again and again if an epoch has a number of samples."""
        total = len(self.shards)
        if self._resampled:
            draw = _generator("stream resampling", self._seed, self._epoch, reader.number)
            while True:
                yield [self.shards[number] for number in draw.integers(0, total, 64)]
        for again in count():
            order = np.arange(total)
            if self._shuffle:
                order = _generator("stream shards", self._seed, self._epoch, again).permutation(total)
            shards = [self.shards[number] for number in order.tolist()]
            yield shards if by_sample else shards[reader.rank :: reader.ranks][reader.worker :: reader.workers]
            if self._samples is None:
                return

    def _read(self, shard: str) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield the samples of a shard: the key and the fields."""
        local = not shard.startswith(COMMAND) and shard != STANDARD_INPUT
        with opened(os.path.join(self._folder, shard) if local else shard) as data:
            for name, fields in samples(_loaded(data, shard), shard):
                yield name, {field: member.data for field, member in fields.items()}

    def _sample(self, shard: str, name: str, fields: dict[str, bytes]) -> Any:
        where = f"sample {name!r} of {shard}"
        about = dict(zip(ABOUT, (name, shard), strict=True))
        sample: Any
        if self._slots is None:
            sample = about | {field: self._decoded(field, data, where) for field, data in fields.items()}
        else:
            items = []
            for slot in self._slots:
                field = chosen(slot, fields)
                if slot in about:
                    items.append(about[slot])
                elif field is None:
                    refuse_missing(where, slot, fields)
                else:
                    items.append(self._decoded(field, fields[field], where))
            sample = tuple(items)
        return sample if self._transform is None else self._transform(sample)

    def _decoded(self, field: str, data: bytes, where: str) -> Any:
        try:
            return self._decoder(field, data)
        except Exception as error:
            note(error, f"{where}, field {field!r}")
            raise


def _loaded(data: Forward, shard: str) -> Iterator[_Loaded]:
    """Yield the members of a shard with their data, which is gone when the next one is read."""
    for member in members(data, shard):
        content = data[member.start : member.start + member.size]
        if len(content) < member.size:
            raise ShardCorrupt(f"{shard} is corrupt at byte {member.header}: its last member was cut off")
        yield _Loaded(member.name, member.header, content)


def _shuffled(found: Iterator[Any], size: int, draw: np.random.Generator) -> Iterator[Any]:
    """Yield all items, each drawn from a buffer of so many."""
    buffer = list(islice(found, size))
    for new in found:
        place = int(draw.integers(len(buffer)))
        drawn, buffer[place] = buffer[place], new
        yield drawn
    while buffer:
        place = int(draw.integers(len(buffer)))
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


def _share(total: int, number: int, among: int) -> int:
    """Return the share of one among several; the first ones have one more where it does not divide."""
    return total // among + (number < total % among)


def _generator(purpose: str, *words: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(key(purpose, *words), np.uint64)))


class _Reader(NamedTuple):
    """One of the workers of all ranks."""

    rank: int
    ranks: int
    worker: int
    workers: int

    @property
    def number(self) -> int:
        """Its number among those of all ranks."""
        return self.rank + self.ranks * self.worker

    @property
    def all(self) -> int:
        """The number of workers of all ranks."""
        return self.ranks * self.workers
