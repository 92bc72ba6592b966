"""Dealing an iterable dataset's samples to the ranks, unless it splits itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from headrace.shards import TarStream
from headrace.types import Tail, World


@dataclass(frozen=True)
class StreamShare:
    """How an iterable dataset is dealt over ranks: sample j goes to rank (j div run) mod W.

    Every rank reads the whole stream and keeps its share. With several workers each of them deals its own stream, so
    that shares may differ by a sample per worker. `tail` rules an unfinished last round of W samples: "exact" gives
    them to the first ranks, "drop" to none, and with "pad" each of the other ranks gets its own first sample again.

    With runs of more than one sample a worker holds a round of W runs at a time. An unfinished last round is cut into
    even shares of neighbouring samples, one for each rank, and "pad" repeats the stream's first samples.
    """

    world: World
    tail: Tail
    run: int = 1

    def of(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Return this rank's samples of the stream."""
        return (_Dealt if self.run == 1 else _DealtInRuns)(self, stream)


class _Dealt:
    """A rank's share of a stream; not a generator, since it must go on after the stream raised an error."""

    def __init__(self, share: StreamShare, stream: Iterator[Any]) -> None:
        self._rank, self._size, self._tail = share.world.rank, share.world.size, share.tail
        self._stream = stream
        self._read = 0
        self._first: Any = None
        self._mine: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            try:  # no `for`, which calls `iter` on the stream again: some streams then begin at the beginning
                sample = next(self._stream)
            except StopIteration:
                break
            place = self._read % self._size
            if self._read in (0, self._rank):
                self._first = sample
            self._read += 1
            if place == self._rank:
                self._mine = sample
            # With equal shares a sample may be given only when the round is known to be complete.
            if place == (self._rank if self._tail == "exact" else self._size - 1):
                return self._mine
        unfinished = self._read % self._size
        self._read = 0
        self._stream = iter(())
        if self._tail == "pad" and unfinished:
            return self._mine if unfinished > self._rank else self._first
        raise StopIteration


class _DealtInRuns:
    """A rank's share of a stream that is dealt in runs of neighbouring samples, one for each rank in a round.

    A sample that raises takes no place in its round: the next one that the stream yields comes instead.
    """

    def __init__(self, share: StreamShare, stream: Iterator[Any]) -> None:
        self._share, self._stream = share, stream
        self._round: list[Any] = []
        self._first: list[Any] = []
        self._mine: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for sample in self._mine:
            return sample
        rank, size = self._share.world.rank, self._share.world.size
        full = size * self._share.run
        ended = False
        while len(self._round) < full and not ended:
            try:  # no `for`, as above
                self._round.append(next(self._stream))
            except StopIteration:
                ended = True
        whole, self._round = self._round, []
        self._first = self._first or whole[:size]
        if ended:
            self._stream = iter(())
            if self._share.tail == "drop":
                del whole[len(whole) // size * size :]
            elif self._share.tail == "pad" and whole:
                whole += islice(cycle(self._first), -len(whole) % size)
        share, more = divmod(len(whole), size)  # the first ranks have one more
        first = rank * share + min(rank, more)
        self._mine = iter(whole[first : first + share + (rank < more)])
        return next(self._mine)


def follows_epoch(dataset: Any) -> bool:
    """Tell whether a stream is told the epoch even without a seed of the loader's: its order depends on that alone."""
    return isinstance(dataset, TarStream)


def batches_of_workers(dataset: Any, workers: int, batch_size: int, drop_last: bool) -> int | None:
    """Count a rank's batches of a stream that says what each worker reads; None for others.

    Args:
        dataset: The stream.
        workers: The rank's workers, at least one.
        batch_size: Samples in a batch.
        drop_last: Whether each worker's last batch is dropped if it is short.
    """
    if not (isinstance(dataset, TarStream) and dataset.epoch_samples is not None):
        return None
    return sum((have if drop_last else have + batch_size - 1) // batch_size for have in dataset.worker_samples(workers))


_WEBDATASETS_SPLITTERS = ("split_by_node", "single_node_only", "ResampledShards")
"""Stages of a WebDataset pipeline that decide which samples a rank reads; the second refuses several ranks."""


def own_splitter(dataset: Any) -> str:
    """Return the name of the code by which an iterable dataset splits itself over the ranks; "" if none is known."""
    if isinstance(dataset, TarStream):
        return "headrace.TarStream"
    package = type(dataset).__module__.partition(".")[0]
    if package == "datasets" and getattr(dataset, "_distributed", None) is not None:
        return "datasets.distributed.split_dataset_by_node"
    stages = getattr(dataset, "pipeline", ()) if package == "webdataset" else ()
    for stage in stages:
        name = getattr(getattr(stage, "func", stage), "__name__", type(stage).__name__)
        if name in _WEBDATASETS_SPLITTERS:
            return f"webdataset.{name}"
    return ""
