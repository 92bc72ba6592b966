"""`TarStream`: tar shards that can only be read forward."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice, starmap
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from headrace.errors import ShardCorrupt, bad_type, bad_value, check_flag, note, whole_number
from headrace.plan.keys import key as words_key
from headrace.shards.decoding import Decode, Decoder
from headrace.shards.fields import ABOUT, chosen, refuse_missing, slots_of
from headrace.shards.names import COMMAND, Shards, shard_names
from headrace.shards.samples import key_and_field, samples
from headrace.shards.sources import STANDARD_INPUT, Forward, opened
from headrace.shards.tar import BLOCK, members
from headrace.system.world import resolve


class _Loaded(NamedTuple):
    """A member with its data."""

    name: str
    header: int
    data: bytes


_Found = tuple[str, str, dict[str, bytes]]
"""An undecoded sample: the shard, the key and the fields."""

_MOST_EMPTY = 16
"""How often as many shards as there are may follow each other without a sample, before that is an error."""


class TarStream(IterableDataset[Any]):
    """The samples of WebDataset's tar shards, read forward: for archives without an index.

    These are compressed archives, standard input (`-`) and the output of commands. For plain tar files `TarDataset` is
    better: it shuffles all samples, gives ranks equal shares, and resumes at once.

    Shards are dealt over the ranks, and each rank's over its workers. Where there are fewer shards than workers in all
    ranks together, each worker reads all shards and keeps its share of the samples; a warning says so. The order
    follows from the seed and the epoch alone. A loader of headrace's tells the epoch, so that each has another order,
    and resumes by reading again up to its place. Elsewhere call `set_epoch` before each epoch, or all are alike.

    A sample that cannot be decoded raises an error; the next sample follows. A damaged shard ends the worker's pass.

    Args:
        shards: Paths, as for `TarDataset`; `-` for standard input; `pipe:` and a shell command. Each may be compressed
            by gzip, bzip2, xz or zstd, whatever its name.
        fields: Which fields to use, as for `TarDataset`.
        decode: How to decode fields, as for `TarDataset`.
        transform: Called with each decoded sample; its result is the sample.
        shuffle: How many samples a buffer holds, from which each next sample is drawn. Shards are permuted, too. 0
            reads in order.
        seed: Of the order.
        epoch_samples: The samples of an epoch over all ranks and workers together, >= 1. Where ranks do not divide it,
            it is rounded up, so that all ranks take equally many. Shards are read again, in another order, where they
            have fewer samples; the buffer is emptied before. So an epoch of as many samples as the shards have is each
            of them once, if each worker's shards have as many as its share. None: each shard once; then ranks may have
            different numbers of samples.
        resampled: Whether each next shard is drawn from all, so that an epoch may read some often and others never. It
            needs `epoch_samples`.
        allow_commands: Whether `pipe:` sources may run shell commands.
        allow_pickle: Whether to unpickle fields that are pickles, as for `TarDataset`.
        max_sample_bytes: The most memory that the names and the data of one sample may need before decoding, in
            bytes, >= 1. A small compressed file may hold any number of bytes; a larger sample is `ShardCorrupt`.

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
        max_sample_bytes: int = 2**30,
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
        self.epoch_samples = None if epoch_samples is None else whole_number("epoch_samples", epoch_samples, low=1)
        self._most = whole_number("max_sample_bytes", max_sample_bytes, low=1)
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
        return sum(self.worker_samples(1))

    def worker_samples(self, workers: int) -> list[int]:
        """Return how many samples of an epoch each of a rank's workers reads.

        Raises:
            TypeError: There is no `epoch_samples`: nobody has counted them.
        """
        if self.epoch_samples is None:
            raise TypeError("a TarStream without epoch_samples has no length: its samples have not been counted")
        mine = -(-self.epoch_samples // resolve(None).size)
        return [mine // workers + (worker < mine % workers) for worker in range(workers)]

    def __iter__(self) -> Iterator[Any]:
        world, info = resolve(None), get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        found = self._found(_Reader(world.rank, world.size, worker, workers, self._epoch))
        if self.epoch_samples is not None:
            found = islice(found, self.worker_samples(workers)[worker])
        return starmap(self._sample, found)  # unlike a generator, it goes on behind a sample that raises an error

    def _found(self, reader: "_Reader") -> Iterator[_Found]:
        """Yield this reader's samples, undecoded, pass by pass."""
        by_sample = len(self.shards) < reader.all and not self._resampled
        if by_sample and reader.number == 0:
            warnings.warn(
                f"{len(self.shards)} shards are fewer than {reader.all} workers of all ranks: each of them reads all "
                "shards and keeps its share of the samples. Use fewer workers, or TarDataset, which splits by sample.",
                stacklevel=2,
            )
        read = empty = 0

        def samples_of(shards: Iterable[str]) -> Iterator[_Found]:
            nonlocal read, empty
            for shard in shards:
                empty += 1
                for name, fields in self._read(shard):
                    empty = 0
                    # Places count on over all shards and passes, so that shares differ by one sample at most.
                    if not by_sample or read % reader.all == reader.number:
                        yield shard, name, fields
                    read += 1
                if empty > _MOST_EMPTY * len(self.shards) and self.epoch_samples is not None:
                    raise ValueError(
                        f"{empty} shards in turn have no sample for worker {reader.number} of {reader.all}"
                    )

        # Keyed by the reader: another buffer holds other samples.
        draw = _generator("stream buffer", self._seed, reader.epoch, reader.number)
        for shards in self._passes(reader, by_sample):
            found = samples_of(shards)
            yield from _shuffled(found, self._shuffle, draw) if self._shuffle else found

    def _passes(self, reader: "_Reader", by_sample: bool) -> Iterator[Iterable[str]]:
        """Yield the shards of this reader, again and again if an epoch has a number of samples."""
        total = len(self.shards)
        if self._resampled:
            yield self._resampled_shards(_generator("stream resampling", self._seed, reader.epoch, reader.number))
        for again in count():
            order = np.arange(total)
            if self._shuffle:
                order = _generator("stream shards", self._seed, reader.epoch, again).permutation(total)
            shards = [self.shards[number] for number in order.tolist()]
            yield shards if by_sample else shards[reader.rank :: reader.ranks][reader.worker :: reader.workers]
            if self.epoch_samples is None:
                return

    def _resampled_shards(self, draw: np.random.Generator) -> Iterator[str]:
        while True:
            for number in draw.integers(0, len(self.shards), 64):
                yield self.shards[number]

    def _read(self, shard: str) -> Iterator[tuple[str, dict[str, bytes]]]:
        """Yield the samples of a shard: the key and the fields."""
        local = not shard.startswith(COMMAND) and shard != STANDARD_INPUT
        with opened(os.path.join(self._folder, shard) if local else shard) as data:
            for name, fields in samples(self._loaded(data, shard), shard):
                yield name, {field: member.data for field, member in fields.items()}

    def _loaded(self, data: Forward, shard: str) -> Iterator[_Loaded]:
        """Yield the members of a shard that belong to samples, with their data."""
        key, size = "", 0
        for member in members(data, shard):
            if not (key and member.name.startswith(f"{key}.") and "/" not in member.name[len(key) :]):
                named = key_and_field(member.name)
                if named is None:
                    continue
                if named[0] != key:
                    key, size = named[0], 0
            size += BLOCK + len(member.name) + member.size
            if size > self._most:
                raise ShardCorrupt(
                    f"{shard} has a sample at byte {member.header} that needs more than {self._most} bytes, the limit: "
                    f"{key!r}. If the shard is right, pass a larger max_sample_bytes."
                )
            content = data[member.start : member.start + member.size]
            if len(content) < member.size:
                raise ShardCorrupt(f"{shard} is corrupt at byte {member.header}: its last member was cut off")
            yield _Loaded(member.name, member.header, content)

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


def _generator(purpose: str, *words: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array(words_key(purpose, *words), np.uint64)))


class _Reader(NamedTuple):
    """One of the workers of all ranks, and the epoch that it reads: `set_epoch` is for the next one."""

    rank: int
    ranks: int
    worker: int
    workers: int
    epoch: int

    @property
    def number(self) -> int:
        """Its number among those of all ranks."""
        return self.rank + self.ranks * self.worker

    @property
    def all(self) -> int:
        """The number of workers of all ranks."""
        return self.ranks * self.workers
