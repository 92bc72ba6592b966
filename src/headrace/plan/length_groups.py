"""Samples sorted by length and cut into groups of batches, and the order in which an epoch reads them."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.plan.keys import hash64, key, uniforms
from headrace.plan.permute import permutation
from headrace.types import Indices, Positions

_GROUPS_KEPT = 8

_CACHED_ENTRIES = 2**23
"""The number of permutation entries that an epoch keeps (64 MiB)."""


class Bucket(NamedTuple):
    """Samples next to each other by length, in groups of one size.

    Attributes:
        start: Its first place.
        size: How many samples fit into a batch.
        groups: How many groups it has.
    """

    start: int
    size: int
    groups: int


class Sorted:
    """All samples by length, longest first, cut into buckets and these into groups: the same in every epoch.

    Args:
        lengths: The length of each sample, shape (n,).
        batch_size: Samples in a batch; None where there is a budget.
        max_tokens: The budget of a batch; None where there is a size.
        cells: How many batches make a group.
        spread: How much longer the longest sample of a bucket may be than the shortest, as a fraction.

    Attributes:
        lengths: The length of each sample, shape (n,).
        cells: How many batches make a group.
        spread: As it was given.
        indices: The dataset indices, shape (n,).
        rest: How many samples are in no group.
        rest_size: How many of them a batch takes.
        buckets: The buckets.
        bucket_of: The bucket of each group, shape (groups,).
        starts: The first place of each group, where those that are left over are not counted, shape (groups,).
        counts: How many samples each group has, shape (groups,).
        sizes: How many of them a batch takes, shape (groups,).
    """

    def __init__(
        self, lengths: NDArray[Any], batch_size: int | None, max_tokens: float | None, cells: int, spread: float
    ) -> None:
        self.lengths, self.cells, self.spread = lengths, cells, spread
        samples = len(lengths)
        kind = np.int32 if samples < 2**31 else np.int64
        self.indices: NDArray[Any] = np.argsort(lengths, kind="stable")[::-1].astype(kind)
        falling = lengths[self.indices]
        rising, start = falling[::-1], 0
        self.buckets: list[Bucket] = []
        while start < samples:
            longest = falling[start].item()
            size = batch_size or _fitting(max_tokens or longest, longest, samples)
            count = cells * size
            if start + count > samples:
                break
            end = samples - int(np.searchsorted(rising, longest / (1 + spread), side="left"))
            groups = max(1, (end - start) // count)
            self.buckets.append(Bucket(start, size, groups))
            start += groups * count
        self.rest = samples - start
        self.rest_size = batch_size or 1
        if batch_size is None and self.rest >= cells:
            self.buckets.append(Bucket(start, self.rest // cells, 1))  # batches of fewer samples than would fit
            self.rest %= cells
        groups_of = np.array([bucket.groups for bucket in self.buckets], np.int64)
        self.bucket_of = np.repeat(np.arange(len(self.buckets)), groups_of)
        self.sizes = np.repeat(np.array([bucket.size for bucket in self.buckets], np.int64), groups_of)
        self.counts: NDArray[np.int64] = cells * self.sizes
        self.starts: NDArray[np.int64] = np.cumsum(self.counts) - self.counts


def _fitting(budget: float, longest: float, most: int) -> int:
    """Return how many samples a batch may hold whose longest is this."""
    fitting = int(min(budget // longest, most))
    return max(1, fitting - (fitting * longest > budget))  # where a quotient of fractions was rounded up


class EpochGroups:
    """One epoch's order: position → group → place in its bucket → dataset index.

    Args:
        parts: The samples by length.
        seed: The plan's seed.
        epoch: The epoch.

    Attributes:
        samples: The samples of the epoch.
        ends: Where each group ends, in the sequence of the epoch, with what is left over as the last one.
        sizes: How many samples of each a batch takes.
    """

    def __init__(self, parts: Sorted, seed: int, epoch: int) -> None:
        self._parts, self._words = parts, (seed, epoch)
        self.samples = len(parts.lengths)
        groups = len(parts.counts)
        self._permuted = np.argsort(hash64(key("bucketed groups", seed, epoch), np.arange(groups)), kind="stable")
        self.ends: list[int] = np.cumsum(parts.counts[self._permuted]).tolist()
        self.sizes: list[int] = parts.sizes[self._permuted].tolist()
        # What is left over are neighbours in any place. The samples behind it are shorter than those whose places they
        # take, so that the sizes of all groups stay within the budget.
        drawn = int(hash64(key("bucketed rest", seed, epoch), np.zeros(1, np.int64))[0])
        self._gap = drawn % (self.samples - parts.rest + 1)
        if parts.rest:
            self.ends.append(self.samples)
            self.sizes.append(parts.rest_size)
        self._all_ends = np.array(self.ends)
        self._members: OrderedDict[int, Indices] = OrderedDict()
        self._tables: OrderedDict[int, Callable[[Positions], Indices]] = OrderedDict()
        self._cached = 0

    def __call__(self, positions: Positions) -> Indices:
        """Return the dataset indices at positions, shape (n,) to (n,)."""
        start, end = self.bounds(len(self.ends) - 1)
        places = np.where(positions < self.samples, positions, start + (positions - self.samples) % (end - start))
        numbers = np.searchsorted(self._all_ends, places, side="right")
        indices = np.empty(len(positions), np.int64)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            indices[chosen] = self._group(number)[places[chosen] - self.bounds(number)[0]]
        return indices

    def bounds(self, group: int) -> tuple[int, int]:
        """Return where a group begins and ends, by its number in the epoch's sequence."""
        return self.ends[group - 1] if group else 0, self.ends[group]

    def groups(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield the groups from the one that holds a position on: the end of each, and its samples in a batch."""
        for group in range(bisect_right(self.ends, position), len(self.ends)):
            yield self.ends[group], self.sizes[group]

    def _group(self, number: int) -> Indices:
        found = self._members.get(number)
        if found is None:
            found = self._members[number] = self._evaluated(number)
            while len(self._members) > _GROUPS_KEPT:
                self._members.popitem(last=False)
        return found

    def _evaluated(self, number: int) -> Indices:
        """Return the dataset indices of a group, longest first."""
        parts = self._parts
        if number == len(self._permuted):
            ranks = self._gap + np.arange(parts.rest)
        else:
            group = int(self._permuted[number])
            bucket = int(parts.bucket_of[group])
            first = parts.buckets[bucket].start
            inside = int(parts.starts[group]) - first + np.arange(int(parts.counts[group]))
            ranks = first + self._permutation(bucket)(inside)
            ranks += (ranks >= self._gap) * parts.rest
        indices: Indices = parts.indices[ranks].astype(np.int64)
        # Lengths that differ by less than the spread are mixed here, too, where a bucket has few groups.
        noise = 1 + parts.spread * uniforms(key("bucketed lengths", *self._words), ranks)
        return indices[np.argsort(-(parts.lengths[indices] * noise), kind="stable")]

    def _permutation(self, number: int) -> Callable[[Positions], Indices]:
        bucket = self._parts.buckets[number]
        found = self._tables.get(number)
        if found is None:
            size = bucket.groups * bucket.size * self._parts.cells
            if self._cached + size > _CACHED_ENTRIES:
                self._tables.clear()
                self._cached = 0
            self._cached += size
            found = self._tables[number] = permutation(key("bucketed", *self._words, number), size)
        return found
