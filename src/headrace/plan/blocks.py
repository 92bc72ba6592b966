"""Shuffling data that is stored in blocks, such as tar shards, so that each rank reads only some of them."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import bad_value, whole_number
from headrace.plan.keys import Key, hash64, key
from headrace.plan.order import EpochOrder, Order, flat_array
from headrace.plan.permute import permutation
from headrace.types import Indices, Positions

_STREAMS = 192
"""The number of streams by default: a multiple of many sizes of worlds."""

_LEAST_SAMPLES = 256
"""Small data has fewer streams by default, so that each has this number of samples to shuffle."""

WINDOW = 2048
"""The number of neighbouring samples of a stream that are permuted together, by default."""

_MOST = 2**31
"""The largest number of streams, and of samples in a window."""

_WINDOWS_KEPT = 2
"""The number of windows whose permutations are kept: ranks and workers stand in neighbouring ones."""


class Blocks(Order):
    """Every sample once per epoch, in an order that follows how the data is stored.

    The blocks are permuted by the seed alone and laid end to end. That line is cut into `streams` runs of equal length,
    give or take one sample. In each epoch the pieces of blocks in a run are permuted, then the samples in windows of
    the run. Position p reads stream p mod `streams`, at place p div `streams`.

    A rank whose world's size divides `streams` reads only its own streams. These lie in the same blocks in every epoch,
    so that caches serve it again. Ranks share a block only where a cut between two runs divides it. In other worlds the
    order is as exact, but ranks share more blocks. The sequence does not depend on the world.

    Args:
        sizes: The number of samples of each block, in the dataset's order, shape (n,), n >= 1; each >= 0, not all 0.
        streams: The number of streams, >= 1: a multiple of the largest world that will read the data. The default is
            192, or for small data the largest divisor of 192 with which each stream has 256 samples.
        window: How many neighbouring samples of a stream are permuted together, >= 1. A larger window mixes better, and
            reads more blocks at a time.

    Raises:
        TypeError: `sizes` are not integers, or no sequence; a number is not an integer.
        ValueError: `sizes` are empty, negative or all 0; a number is out of its range.
    """

    def __init__(
        self, sizes: Sequence[int] | NDArray[np.integer], streams: int | None = None, window: int = WINDOW
    ) -> None:
        array = flat_array("sizes", sizes, "a non-empty sequence of integers")
        if array.dtype.kind not in "iu":
            raise TypeError(f"sizes of dtype {array.dtype} are not allowed: expected integers, samples of each block.")
        if array.min() < 0:
            bad_value("sizes", int(array.min()), "integers >= 0", "Count the samples of each block.")
        if not array.any():
            raise ValueError("sizes are all 0: expected at least one block with a sample.")
        self.sizes: NDArray[np.int64] = array.astype(np.int64)
        self.window = whole_number("window", window, low=1, high=_MOST, fix="Some thousands mix well.")
        self._total = int(self.sizes.sum())
        fix = "A multiple of the world's size keeps ranks apart."
        if streams is not None:
            streams = whole_number("streams", streams, low=1, high=_MOST, fix=fix)
        self.streams = _suitable(self._total) if streams is None else streams

    def _parameters(self) -> tuple[Any, ...]:
        return self.sizes, self.streams, self.window

    def __repr__(self) -> str:
        return f"Blocks({len(self.sizes):,} blocks, streams={self.streams}, window={self.window})"

    def samples(self, length: int) -> int:
        """Count one epoch: the samples of all blocks.

        Raises:
            ValueError: The dataset has another number of samples.
        """
        if self._total != length:
            bad_value(
                "sum of sizes",
                self._total,
                f"the number of samples, len(dataset)={length}",
                "Take the sizes from this dataset.",
            )
        return length

    def epoch(self, seed: int, epoch: int, length: int) -> EpochOrder:
        """Return this epoch's order, wrapping round at the dataset's end."""
        return _BlocksEpoch(*self._pieces(seed), self._runs, self.window, (seed, epoch))

    def blocks_of(self, seed: int, stream: int) -> NDArray[np.int64]:
        """Return the numbers of the blocks that a stream reads, the same in every epoch.

        Args:
            seed: The plan's seed.
            stream: The stream, in [0, streams).
        """
        runs, starts, _ = self._pieces(seed)
        ends = np.cumsum(self.sizes)
        return np.unique(np.searchsorted(ends, starts[runs == stream], side="right"))

    @property
    def _runs(self) -> int:
        """The number of streams that have samples."""
        return min(self.streams, self._total)

    def _pieces(self, seed: int) -> tuple[NDArray[np.int64], Indices, NDArray[np.int64]]:
        """Return the pieces of blocks on the line of permuted blocks, cut where a run ends.

        Returns:
            The run of each piece, ascending; the dataset index of its first sample; and its samples, >= 1. All have
            shape (pieces,).
        """
        placed = permutation(key("blocks", seed), len(self.sizes))(np.arange(len(self.sizes)))
        placed = placed[self.sizes[placed] > 0]
        ends = np.cumsum(self.sizes[placed])
        cuts = np.unique(np.concatenate([ends, _run_starts(self._total, self._runs)[1:]]))
        cuts = cuts[cuts > 0]
        starts = np.concatenate([[0], cuts[:-1]])
        blocks = np.searchsorted(ends, starts, side="right")
        before = ends[blocks] - self.sizes[placed[blocks]]  # where the piece's block begins on the line
        first = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        runs = np.searchsorted(_run_starts(self._total, self._runs), starts, side="right") - 1
        return runs, first[placed[blocks]] + starts - before, cuts - starts


def _suitable(total: int) -> int:
    """Return the number of streams for so many samples."""
    return max(one for one in range(1, _STREAMS + 1) if _STREAMS % one == 0 and one <= max(1, total // _LEAST_SAMPLES))


def _run_starts(total: int, streams: int) -> NDArray[np.int64]:
    """Return where each run begins on the line, and where the last one ends, shape (streams + 1,)."""
    runs = np.arange(streams + 1)
    return runs * (total // streams) + np.minimum(runs, total % streams)


class _BlocksEpoch:
    """One epoch's order: position → (stream, place) → place in the permuted window → piece → dataset index."""

    def __init__(
        self,
        runs: NDArray[np.int64],
        starts: Indices,
        sizes: NDArray[np.int64],
        streams: int,
        window: int,
        words: tuple[int, int],
    ) -> None:
        self._total, self._streams, self._window, self._words = int(sizes.sum()), streams, window, words
        shuffled = np.lexsort((hash64(key("pieces", *words), np.arange(len(sizes))), runs))
        self._ends = np.cumsum(sizes[shuffled])
        self._shifts = starts[shuffled] - (self._ends - sizes[shuffled])  # from a place on the line to a dataset index
        self._run_starts = _run_starts(self._total, streams)
        self._tables: OrderedDict[int, _Window] = OrderedDict()

    def __call__(self, positions: Positions) -> Indices:
        places, streams = np.divmod(positions % self._total, self._streams)
        windows = places // self._window
        line = np.empty(len(positions), np.int64)
        for number in np.unique(windows):
            chosen = windows == number
            line[chosen] = self._of_window(int(number))(streams[chosen], places[chosen])
        indices: Indices = line + self._shifts[np.searchsorted(self._ends, line, side="right")]
        return indices

    def _of_window(self, number: int) -> "_Window":
        window = self._tables.pop(number, None)
        if window is None:
            window = _Window(self._run_starts, number * self._window, self._window, key("window", *self._words, number))
        self._tables[number] = window
        if len(self._tables) > _WINDOWS_KEPT:
            self._tables.popitem(last=False)
        return window


class _Window:
    """The same window of all runs: each run's samples in it are permuted by themselves.

    Args:
        run_starts: Where each run begins on the line, and where the last one ends.
        start: The window's first place in each run.
        size: Its number of places, where the run is long enough.
        under: Its key; each run has a part of the words under it.
    """

    def __init__(self, run_starts: NDArray[np.int64], start: int, size: int, under: Key) -> None:
        self._run_starts, self._start, self._size, self._under = run_starts, start, size, under
        self._rows = np.full(len(run_starts) - 1, -1)  # of each run in the table; -1 where nobody has asked for it
        self._width = int(min(size, np.diff(run_starts).max()))  # no run has more places
        self._table = np.empty((0, self._width), np.int32)

    def __call__(self, runs: NDArray[np.int64], places: Positions) -> NDArray[np.int64]:
        """Return the places on the line that are read at places of runs, all in this window, shape (n,) to (n,)."""
        new = np.unique(runs[self._rows[runs] < 0])
        if new.size:
            self._rows[new] = len(self._table) + np.arange(len(new))
            self._table = np.concatenate([self._table, self._permuted(new)])
        first = self._run_starts[runs] + self._start
        line: NDArray[np.int64] = first + self._table[self._rows[runs], places - self._start]
        return line

    def _permuted(self, runs: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return a permutation for each run, shape (runs, width); what exceeds a run's end is undefined."""
        lengths = np.minimum(self._run_starts[runs + 1] - self._run_starts[runs] - self._start, self._size)
        table = np.zeros((len(runs), self._width), np.int32)
        for length in np.unique(lengths):  # at the end of the runs there are two
            chosen = np.flatnonzero(lengths == length)
            words = hash64(self._under, runs[chosen, None] * self._size + np.arange(length))
            table[chosen, :length] = np.argsort(words, axis=1, kind="stable")
        return table
