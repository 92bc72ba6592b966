"""Batches of samples of similar length, under a budget, for data of varying length such as text and speech."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import bad_type, bad_value, whole_number
from headrace.plan.batching import Batching
from headrace.plan.keys import hash64, key, uniforms
from headrace.plan.order import EpochOrder, Order, flat_array
from headrace.plan.permute import permutation
from headrace.types import Indices, Positions, Tail

_WINDOW = 2**18
"""The number of samples that are sorted together, by default."""

_EPOCHS_KEPT, _WINDOWS_KEPT, _WALKS_KEPT = 2, 2, 4


class LengthBucketed(Order):
    """Every sample once per epoch, in batches of samples of similar length, so that little padding is needed.

    Exactly one of `batch_size` and `max_tokens` says what a batch holds. The loader's own `batch_size` is left out:

        DataLoader(dataset, order=LengthBucketed(lengths, max_tokens=16_384), collate_fn=pad)

    At each step all ranks have batches from one *bucket* of neighbouring lengths, with equally many samples, give or
    take one. So no rank waits long for another. Each epoch is shuffled anew: other samples meet in a batch, and the
    batches come in another sequence. All ranks take equally many steps. Their number may differ by epoch, and `len()`
    of the loader has to find it. That takes about 0.15 s for each million of samples, once an epoch.

    How it is made: a shuffle of the whole epoch is cut into windows. In a window samples are sorted by the bucket of
    their lengths, longest first, and cut into groups of `cells` batches. The groups of a window are permuted. If
    ranks · `per_rank` divides `cells`, all ranks take their batches from one group at each step. In other worlds every
    sample is still read once, within the budget, but some steps are small or take samples of two groups.

    Args:
        lengths: The length of each sample, in tokens, frames or seconds: numbers > 0, shape (n,).
        batch_size: Samples in a batch, >= 1.
        max_tokens: The budget of a batch, in the unit of `lengths`: its samples times the longest of them, as if all
            were padded to that, is at most so much.
        per_rank: How many such batches each rank takes at a step, as one batch, >= 1. W ranks with `per_rank=k` read
            the same global batches as k · W ranks with 1, so a run may go on with fewer ranks.
        cells: How many batches come from one bucket in sequence, >= 1: a multiple of the largest ranks · `per_rank`.
        spread: How much longer the longest sample of a bucket may be than the shortest, as a fraction, in (0, 1]. Less
            means less padding, more means that other samples meet in each epoch.
        window: How many samples are sorted together, >= 1. More means less padding, and more memory.

    Raises:
        TypeError: `lengths` are not numbers, or an option is not.
        ValueError: A length is not > 0 or exceeds `max_tokens`; an option is out of its range; neither or both of
            `batch_size` and `max_tokens` are given.
    """

    def __init__(
        self,
        lengths: Sequence[float] | NDArray[Any],
        batch_size: int | None = None,
        max_tokens: float | None = None,
        *,
        per_rank: int = 1,
        cells: int = 8,
        spread: float = 0.05,
        window: int = _WINDOW,
    ) -> None:
        self.lengths = _checked_lengths(lengths)
        if (batch_size is None) is (max_tokens is None):
            raise ValueError(
                f"batch_size={batch_size!r}, max_tokens={max_tokens!r} is not allowed: expected exactly one of them. "
                "Pass max_tokens for batches of varying size under a budget, batch_size for a fixed size."
            )
        if batch_size is not None:
            batch_size = whole_number("batch_size", batch_size, low=1, fix="Count the samples of a batch.")
        self.batch_size, self.max_tokens = batch_size, max_tokens
        self.per_rank = whole_number("per_rank", per_rank, low=1, fix="Leave it out for one batch a rank and step.")
        self.cells = whole_number(
            "cells", cells, low=1, fix="A multiple of the number of ranks keeps them in a bucket."
        )
        self.spread = _number("spread", spread, "a number in (0, 1]", "0.05 costs about 2% of padding.")
        if not 0 < self.spread <= 1:
            bad_value("spread", spread, "a number in (0, 1]", "0.05 costs about 2% of padding.")
        self.window = whole_number("window", window, low=1, fix="Leave it out for 262,144 samples.")
        if max_tokens is not None:
            self.max_tokens = _number("max_tokens", max_tokens, "a number > 0", "Count padded tokens of a batch.")
            self._check_budget(self.max_tokens)
        unit = self.cells * (batch_size or 1)
        self._span = max(1, self.window // unit) * unit
        self._epochs: OrderedDict[tuple[int, int], _Epoch] = OrderedDict()

    def _check_budget(self, budget: float) -> None:
        longer = np.flatnonzero(self.lengths > budget)
        if longer.size:
            first, longest = int(longer[0]), self.lengths.max().item()
            raise ValueError(
                f"lengths[{first}]={self.lengths[first]} is not allowed: expected at most max_tokens={budget:g}. "
                f"{longer.size:,} of {self.lengths.size:,} samples are longer than that, the longest {longest:g}. "
                "Raise max_tokens, cut these samples in the dataset and in lengths, or leave them out: "
                "torch.utils.data.Subset(dataset, kept) with lengths[kept]."
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epochs": OrderedDict()}  # workers build the tables that they need

    def _parameters(self) -> tuple[Any, ...]:
        # Not `per_rank`, which changes no sequence, so that a run may go on with another.
        return self.lengths, self.batch_size, self.max_tokens, self.cells, self.spread, self.window

    def __repr__(self) -> str:
        size = f"max_tokens={self.max_tokens:g}" if self.batch_size is None else f"batch_size={self.batch_size}"
        return f"LengthBucketed({len(self.lengths):,} lengths, {size}, per_rank={self.per_rank}, cells={self.cells})"

    def samples(self, length: int) -> int:
        """Count one epoch: the dataset's own length.

        Raises:
            ValueError: There is not one length per dataset sample.
        """
        if len(self.lengths) != length:
            fix = "Take the lengths from this dataset."
            bad_value("len(lengths)", len(self.lengths), f"one length per sample, len(dataset)={length}", fix)
        return length

    def epoch(self, seed: int, epoch: int, length: int) -> EpochOrder:
        """Return this epoch's order, wrapping round at the dataset's end."""
        return self._epoch(seed, epoch)

    def batches(self, seed: int, ranks: int, batch_size: int, tail: Tail) -> Batching:
        """Return how the epoch is cut for so many ranks, each with `batch_size` of the order's batches at a step."""
        return _Bucketed(self, seed, ranks, batch_size, tail)

    def similar(self, seed: int, epoch: int, position: int, samples: int) -> tuple[int, int]:
        """Return the group of a position: its samples exceed no budget in each other's place."""
        return self._epoch(seed, epoch).group(position % samples)

    def _epoch(self, seed: int, epoch: int) -> "_Epoch":
        found = self._epochs.get((seed, epoch))
        if found is None:
            found = self._epochs[seed, epoch] = _Epoch(self, seed, epoch)
            while len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return found


def _checked_lengths(lengths: object) -> NDArray[Any]:
    found = flat_array("lengths", lengths, "a non-empty sequence of numbers > 0, one for each sample")
    if found.dtype.kind not in "iuf":
        raise TypeError(
            f"lengths of dtype {found.dtype} are not allowed: expected numbers > 0. Pass one length per dataset sample."
        )
    wrong = np.flatnonzero(~((found > 0) & np.isfinite(found)))
    if wrong.size:
        first, some = int(wrong[0]), f"{wrong.size:,} of {found.size:,} lengths are 0, negative, NaN or infinite."
        bad_value(f"lengths[{first}]", found[first].item(), "finite numbers > 0", f"{some} Leave these samples out.")
    return found.astype(np.float64 if found.dtype.kind == "f" else np.int64)


def _number(name: str, value: Any, allowed: str, fix: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        bad_type(name, value, allowed, fix)
    if not (np.isfinite(value) and value > 0):
        bad_value(name, value, allowed, fix)
    return float(value)


class _Epoch:
    """One epoch's order: position → window → group → dataset index."""

    def __init__(self, order: LengthBucketed, seed: int, epoch: int) -> None:
        self._order, self._words = order, (seed, epoch)
        self.samples = len(order.lengths)
        self._windows = max(1, self.samples // order._span)  # the last one may be longer
        self._shuffled = permutation(key("bucketed", seed, epoch), self.samples)
        self._kept: OrderedDict[int, _Window] = OrderedDict()
        self._groups: dict[int, tuple[list[int], list[int]]] = {}

    def __call__(self, positions: Positions) -> Indices:
        """Return the dataset indices at positions, shape (n,) to (n,); those beyond the epoch wrap round."""
        positions = positions % self.samples
        numbers = np.minimum(positions // self._order._span, self._windows - 1)
        indices = np.empty(len(positions), np.int64)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            indices[chosen] = self._window(number).indices[positions[chosen] - number * self._order._span]
        return indices

    def groups(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield the groups from the one that holds a position on: the end of each, and its samples in a batch."""
        if position >= self.samples:
            return
        for number in range(self._number(position), self._windows):
            ends, sizes = self._groups_of(number)
            for place in range(bisect_right(ends, position), len(ends)):
                yield ends[place], sizes[place]

    def group(self, position: int) -> tuple[int, int]:
        """Return where the group that holds a position begins and ends."""
        number = self._number(position)
        ends, _ = self._groups_of(number)
        place = bisect_right(ends, position)
        return ends[place - 1] if place else number * self._order._span, ends[place]

    def _number(self, position: int) -> int:
        return min(position // self._order._span, self._windows - 1)

    def _groups_of(self, number: int) -> tuple[list[int], list[int]]:
        """Return the groups of a window: their ends, and how many samples of each fit into one batch."""
        if number not in self._groups:
            self._window(number)
        return self._groups[number]

    def _window(self, number: int) -> "_Window":
        window = self._kept.get(number)
        if window is None:
            first = number * self._order._span
            last = self.samples if number == self._windows - 1 else first + self._order._span
            window = _Window(self._order, self._shuffled(np.arange(first, last)), (*self._words, number))
            self._groups[number] = (window.ends + first).tolist(), window.sizes.tolist()
            self._kept[number] = window
            while len(self._kept) > _WINDOWS_KEPT:
                self._kept.popitem(last=False)
        return window


class _Window:
    """Samples that are sorted together, in groups.

    Args:
        order: The order, for its lengths and options.
        indices: The dataset indices of the samples, shuffled, shape (n,).
        words: What keys the window: seed, epoch and its number.

    Attributes:
        indices: The dataset indices, group by group, shape (n,).
        ends: Where each group ends, shape (groups,).
        sizes: How many samples of a group fit into one batch, shape (groups,).
    """

    def __init__(self, order: LengthBucketed, indices: Indices, words: tuple[int, int, int]) -> None:
        lengths = order.lengths[indices]
        buckets = np.searchsorted(_edges(lengths, order.spread, words), lengths, side="right")
        longest_first = np.argsort((buckets.max() - buckets).astype(np.uint16), kind="stable")
        indices, lengths = indices[longest_first], lengths[longest_first]
        fitting = _fitting(order, lengths)
        starts = _starts(fitting, order.cells)
        ends = np.append(starts[1:], len(indices))
        sizes = fitting[starts]
        # The groups are permuted; the one that is not full, which has the shortest samples, stays the last.
        whole = len(starts) - int(ends[-1] - starts[-1] < order.cells * sizes[-1])
        hashed = hash64(key("bucketed groups", *words), np.arange(whole))
        permuted = np.append(np.argsort(hashed, kind="stable"), np.arange(whole, len(starts)))
        counts = (ends - starts)[permuted]
        self.ends: NDArray[np.int64] = np.cumsum(counts)
        self.sizes: NDArray[np.int64] = sizes[permuted]
        self.indices: Indices = indices[
            np.repeat(starts[permuted] - self.ends + counts, counts) + np.arange(len(indices))
        ]


def _edges(lengths: NDArray[Any], spread: float, words: tuple[int, int, int]) -> NDArray[np.float64]:
    """Return where buckets of lengths begin, ascending; they are moved in each window, so that other samples meet.

    Products alone: a logarithm may have another last bit on another machine.
    """
    edge = float(lengths.min()) * (
        1 + spread * float(uniforms(key("bucketed edges", *words), np.zeros(1, np.int64))[0])
    )
    edges, longest = [edge], float(lengths.max())
    while edge < longest:
        edge *= 1 + spread
        edges.append(edge)
    return np.array(edges)


def _fitting(order: LengthBucketed, lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many samples a batch may hold that has none before each place, shape (n,)."""
    if order.batch_size is not None:
        return np.full(len(lengths), order.batch_size)
    assert order.max_tokens is not None
    longest = np.maximum.accumulate(lengths[::-1])[::-1]  # from each place on
    fitting: NDArray[np.int64] = (order.max_tokens // longest).astype(np.int64)
    fitting -= fitting * longest > order.max_tokens  # where a quotient of fractions was rounded up
    return np.maximum(fitting, 1)


def _starts(fitting: NDArray[np.int64], cells: int) -> NDArray[np.int64]:
    """Return where each group begins. The last one has fewer samples, but one for each batch where that is possible."""
    starts, start, samples = [], 0, len(fitting)
    while start < samples:
        starts.append(start)
        start += cells * int(fitting[start])
    if samples - starts[-1] < cells and len(starts) > 1 and fitting[starts[-2]] > 1:
        starts[-1] -= cells
    return np.array(starts)


class _Bucketed(Batching):
    """Global batches that each come from one group, as far as the groups are large enough for the world.

    Where a step begins decides alone how many samples it has, so that a run may go on at any step.
    """

    def __init__(self, order: LengthBucketed, seed: int, ranks: int, batch_size: int, tail: Tail) -> None:
        super().__init__(len(order.lengths), ranks, batch_size, tail)
        self._order, self._seed = order, seed
        self._walks: OrderedDict[tuple[int, int], dict[int, int]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_walks": OrderedDict()}

    def end(self, epoch: int, cursor: int) -> int:
        """Return the position at which the last step ends."""
        stops = self._stops(epoch, cursor, None)
        return stops.get(len(stops) - 1, cursor)

    def steps(self, epoch: int, cursor: int) -> int:
        """Count the steps: all windows that are left have to be sorted for that."""
        return len(self._stops(epoch, cursor, None))

    def bounds(self, epoch: int, step: int, cursor: int) -> tuple[int, int]:
        """Return the step's range of positions; the steps before it are found, too, the first time."""
        stops = self._stops(epoch, cursor, step)
        if step not in stops:
            return self.samples, self.samples
        return stops[step - 1] if step else cursor, stops[step]

    def _stops(self, epoch: int, cursor: int, step: int | None) -> dict[int, int]:
        """Return where the steps from `cursor` on end, at least those up to `step`; all of them if that is None.

        Threads that share a plan may find the same steps at the same time: a dictionary bears that.
        """
        stops = self._walks.get((epoch, cursor))
        if stops is None:
            stops = self._walks[epoch, cursor] = {}
            while len(self._walks) > _WALKS_KEPT:
                self._walks.popitem(last=False)
        found = len(stops)
        while step is None or found <= step:
            start = stops[found - 1] if found else cursor
            if (stop := self._stop(epoch, start)) == start:
                break
            stops[found] = stop
            found += 1
        return stops

    def _stop(self, epoch: int, start: int) -> int:
        """Return where the step ends that begins at `start`; `start` itself if the epoch is over."""
        fewest = 0
        for end, size in self._order._epoch(self._seed, epoch).groups(start):
            fewest = min(fewest or size, size)
            if count := self._count(end - start, fewest, last=end == self.samples):
                return start + count
        return start

    def _count(self, left: int, size: int, last: bool) -> int:
        """Return how many samples a step takes of those that are left of a group; 0 if it needs more groups.

        Args:
            left: The samples that are left.
            size: How many of them fit into one batch.
            last: Whether no further group follows. Then 0 says that the epoch is over, and pads count.
        """
        batches = self.ranks * self.batch_size
        whole = batches * size
        if left >= whole + batches or left == whole:
            return whole
        if last and self.tail == "drop":
            return whole if left > whole else 0
        if batches <= left <= whole:
            return left
        if left >= 2 * batches:
            return left - batches  # the next step takes one for each batch
        if not last:
            return 0
        if left > whole:
            return whole
        return max(left, self.ranks) if self.tail == "pad" else left
