"""Batches of samples of similar length, under a budget, for data of varying length such as text and speech."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import bad_type, bad_value, whole_number
from headrace.plan.batching import Batching
from headrace.plan.length_groups import EpochGroups, Sorted
from headrace.plan.order import EpochOrder, Order, flat_array
from headrace.types import Tail

_LONGEST = 2**53
"""Up to this number integers are exact as doubles, in which they are divided."""

_EPOCHS_KEPT, _WALKS_KEPT = 2, 4


class LengthBucketed(Order):
    """Every sample once per epoch, in batches of samples of similar length, so that little padding is needed.

    Exactly one of `batch_size` and `max_tokens` says what a batch holds. The loader's own `batch_size` is left out:

        DataLoader(dataset, order=LengthBucketed(lengths, max_tokens=16_384), collate_fn=pad)

    At each step all ranks have equally many samples of neighbouring lengths, so that no rank waits long for another.
    Each epoch is shuffled anew: other samples meet in a batch, and the batches come in another sequence. All ranks take
    equally many steps, the same number in every epoch. This holds where ranks · `per_rank` divides `cells`. In other
    worlds every sample is still read once and within the budget, but some steps are small or mix lengths, ranks may
    differ by one sample at a step, and `len()` of the loader may differ by epoch.

    How it is made: samples are sorted by length, once, and cut into *buckets*, each of one batch size. A bucket is cut
    into groups of `cells` batches. Each epoch permutes the samples of a bucket, and the groups of all buckets. A group
    is read longest first, by up to `cells` steps in sequence. The fewer than `cells` samples that are left over come
    last, one for each batch; with `batch_size`, those of an incomplete group. They are others in each epoch. What
    happens where they cannot be shared out evenly is the loader's `tail` rule, as with any order.

    Sorting takes about 0.1 s for a million samples. Each process keeps the lengths and the sorted indices, 4 bytes each
    a sample.

    Args:
        lengths: The length of each sample, in tokens, frames or seconds: numbers in (0, 2^53], shape (n,).
        batch_size: Samples in a batch, >= 1.
        max_tokens: The budget of a batch, in the unit of `lengths`: its samples times the longest of them, as if all
            were padded to that, is at most so much.
        per_rank: How many such batches each rank takes at a step, as one batch, >= 1; it divides `cells`. W ranks with
            `per_rank=k` read the same global batches as k · W ranks with 1, so a run may go on with fewer ranks.
        cells: How many batches make a group, >= 1: a multiple of the number of ranks. Fewer mix better.
        spread: How much longer the longest sample of a bucket may be than the shortest, as a fraction, in (0, 1]. A
            bucket has at least one group, however far its lengths spread. Less means less padding, more means that
            other samples meet in each epoch.

    Raises:
        TypeError: `lengths` are not numbers, or an option is not.
        ValueError: A length is out of its range or exceeds `max_tokens`; an option is out of its range; neither or both
            of `batch_size` and `max_tokens` are given.
    """

    per_rank: int  # every order of this kind has it

    def __init__(
        self,
        lengths: Sequence[float] | NDArray[Any],
        batch_size: int | None = None,
        max_tokens: float | None = None,
        *,
        per_rank: int = 1,
        cells: int = 8,
        spread: float = 0.05,
    ) -> None:
        self.lengths = _checked_lengths(lengths)
        if (batch_size is None) is (max_tokens is None):
            raise ValueError(
                f"batch_size={batch_size!r}, max_tokens={max_tokens!r} is not allowed: expected exactly one of them. "
                "Pass max_tokens for batches of varying size under a budget, batch_size for a fixed size."
            )
        if batch_size is not None:
            batch_size = whole_number("batch_size", batch_size, low=1, fix="Count the samples of a batch.")
        if max_tokens is not None:
            max_tokens = _number("max_tokens", max_tokens, "a number > 0", "Count the padded tokens of a batch.")
            _check_budget(self.lengths, max_tokens)
        self.batch_size, self.max_tokens = batch_size, max_tokens
        fix = "A multiple of the number of ranks lets all of them read from one bucket."
        self.cells = whole_number("cells", cells, low=1, high=2**20, fix=fix)
        self.per_rank = whole_number("per_rank", per_rank, low=1, fix="Leave it out for one batch a rank and step.")
        if self.cells % self.per_rank:
            bad_value("per_rank", per_rank, f"a divisor of cells={self.cells}", "Or pass another cells.")
        allowed = "a number in (0, 1]"
        self.spread = _number("spread", spread, allowed, "0.05 costs about 2% of padding.")
        if self.spread > 1:
            bad_value("spread", spread, allowed, "0.05 costs about 2% of padding.")
        self._epochs: OrderedDict[tuple[int, int], EpochGroups] = OrderedDict()

    @cached_property
    def sorted(self) -> Sorted:
        """The samples by length, cut into groups."""
        return Sorted(self.lengths, self.batch_size, self.max_tokens, self.cells, self.spread)

    def __getstate__(self) -> dict[str, Any]:
        # Sorted once, for all processes. They build the tables of the epochs that they need.
        return self.__dict__ | {"sorted": self.sorted, "_epochs": OrderedDict()}

    def _parameters(self) -> tuple[Any, ...]:
        # Not `per_rank`, which changes no sequence, so that a run may go on with another.
        return self.lengths, self.batch_size, self.max_tokens, self.cells, self.spread

    def __repr__(self) -> str:
        size = f"max_tokens={self.max_tokens!r}" if self.batch_size is None else f"batch_size={self.batch_size}"
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
        """Return this epoch's order; pads read the epoch's last group again, which is within the budget."""
        return self.table(seed, epoch)

    def batches(self, seed: int, ranks: int, batch_size: int, tail: Tail) -> Batching:
        """Return how the epoch is cut for so many ranks, each with `batch_size` of the order's batches at a step."""
        return _Bucketed(self, seed, ranks, batch_size, tail)

    def similar(self, seed: int, epoch: int, position: int, samples: int) -> tuple[int, int]:
        """Return the group of a position: its samples exceed no budget in each other's place."""
        table = self.table(seed, epoch)
        group = min(bisect_right(table.ends, position), len(table.ends) - 1)  # pads read the last one again
        # What is left over is read one by one, so that any sample will do.
        return table.bounds(group) if group < len(self.sorted.counts) else (0, samples)

    def table(self, seed: int, epoch: int) -> EpochGroups:
        """Return one epoch's order."""
        found = self._epochs.get((seed, epoch))
        if found is None:
            found = self._epochs[seed, epoch] = EpochGroups(self.sorted, seed, epoch)
            while len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return found


def _checked_lengths(lengths: object) -> NDArray[Any]:
    found = flat_array("lengths", lengths, "a non-empty sequence of numbers > 0, one for each sample")
    if found.dtype.kind not in "iuf":
        raise TypeError(
            f"lengths of dtype {found.dtype} are not allowed: expected numbers > 0. Pass one length per dataset sample."
        )
    wrong = np.flatnonzero(~((found > 0) & (found <= _LONGEST)))
    if wrong.size:
        first, some = int(wrong[0]), f"{wrong.size:,} of {found.size:,} lengths are 0, negative, NaN or above 2^53."
        bad_value(f"lengths[{first}]", found[first].item(), "numbers in (0, 2^53]", f"{some} Leave these samples out.")
    if found.dtype.kind == "f" and not np.array_equal(found, np.floor(found)):
        return found.astype(np.float64)
    return found.astype(np.int32 if found.max() < 2**31 else np.int64)


def _check_budget(lengths: NDArray[Any], budget: float) -> None:
    longer = np.flatnonzero(lengths > budget)
    if longer.size:
        first = int(longer[0])
        raise ValueError(
            f"lengths[{first}]={lengths[first]} is not allowed: expected at most max_tokens={budget!r}. "
            f"{longer.size:,} of {lengths.size:,} samples are longer than that, the longest {lengths.max()}. Raise "
            "max_tokens, cut these samples in the dataset and in lengths, or leave them out: "
            "torch.utils.data.Subset(dataset, kept) with lengths[kept]."
        )


def _number(name: str, value: Any, allowed: str, fix: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        bad_type(name, value, allowed, fix)
    if not 0 < value < 2**1000:
        bad_value(name, value, allowed, fix)
    number = float(value)
    return int(number) if number.is_integer() else number


class _Bucketed(Batching):
    """Global batches that each come from one group, as far as the groups are large enough for the world.

    Where the batches of a step divide `cells`, steps are numbered: each group has equally many. Elsewhere, and for a
    run that goes on from such a world, where a step begins decides alone how many samples it has.
    """

    def __init__(self, order: LengthBucketed, seed: int, ranks: int, batch_size: int, tail: Tail) -> None:
        super().__init__(len(order.lengths), ranks, batch_size, tail)
        self._order, self._seed = order, seed
        self._batches = ranks * batch_size
        self._steps = 0 if order.cells % self._batches else order.cells // self._batches  # of a group
        self._walks: OrderedDict[tuple[int, int], dict[int, int]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_walks": OrderedDict()}

    def end(self, epoch: int, cursor: int) -> int:
        """Return the position at which the last step ends."""
        steps = self.steps(epoch, cursor)
        return self.bounds(epoch, steps - 1, cursor)[1] if steps else cursor

    def steps(self, epoch: int, cursor: int) -> int:
        """Count the steps. Where ranks do not divide the groups, they have to be found one by one."""
        first = self._number(epoch, cursor)
        if first is None:
            return len(self._stops(epoch, cursor, None))
        parts = self._order.sorted
        size = self._batches * parts.rest_size
        rest = parts.rest // size if self.tail == "drop" else -(-parts.rest // size)
        return max(0, self._steps * len(parts.counts) + rest - first)

    def bounds(self, epoch: int, step: int, cursor: int) -> tuple[int, int]:
        """Return the step's range of positions."""
        none = self.samples, self.samples
        if step < 0 or cursor >= self.samples:
            return none
        first = self._number(epoch, cursor)
        if first is None:
            stops = self._stops(epoch, cursor, step)
            return (stops[step - 1] if step else cursor, stops[step]) if step in stops else none
        table, groups = self._order.table(self._seed, epoch), len(self._order.sorted.counts)
        group = min((first + step) // self._steps, groups)
        if group >= len(table.ends):
            return none
        start, end = table.bounds(group)
        size = self._batches * table.sizes[group]
        start += (first + step - group * self._steps) * size
        if start + size <= end:
            return start, start + size
        return (start, start + self._last(end - start)) if start < end else none

    def _number(self, epoch: int, position: int) -> int | None:
        """Return the number of the step that begins at a position; None where steps are not numbered."""
        if not self._steps or not position:
            return 0 if self._steps else None
        table = self._order.table(self._seed, epoch)
        group = bisect_right(table.ends, position)
        if group == len(table.ends):
            return None
        number, inside = divmod(position - table.bounds(group)[0], self._batches * table.sizes[group])
        return None if inside else group * self._steps + number

    def _last(self, left: int) -> int:
        """Return the size of the last step, where so few samples are left that it is not full."""
        return 0 if self.tail == "drop" else -(-left // self.ranks) * self.ranks if self.tail == "pad" else left

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
        for end, size in self._order.table(self._seed, epoch).groups(start):
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
        whole = self._batches * size
        if left >= whole + self._batches or left == whole:
            return whole
        if last:
            return whole if left > whole else self._last(left)
        if self._batches <= left < whole:
            return left
        return left - self._batches if left >= 2 * self._batches else 0
