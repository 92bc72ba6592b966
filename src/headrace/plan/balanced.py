"""Batches with equally many samples of each class, on every rank."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import bad_value, whole_number
from headrace.plan.keys import Key, hash64, key
from headrace.plan.order import EpochOrder, Order, flat_array
from headrace.plan.permute import SMALL, permutation
from headrace.types import Indices, Positions

_CACHED_ENTRIES = 2**23
"""The number of permutation entries that an epoch keeps (64 MiB); beyond it the least recently used is dropped."""


class Balanced(Order):
    """Give every full batch of every rank the same number of samples of each class.

    Where the batch size is no multiple of the number of classes, counts differ by at most one. Rare
    classes are read again and again, each pass over them in a new order; frequent ones are read in part.

    Global position p takes its class from slot p mod K, the slots being the epoch's permutation of the K
    classes: every window of the order, wherever it begins, is balanced to ±1. Within a global batch the
    positions are dealt to ranks class by class, so the batch's set does not depend on the world. The ranks' batches
    laid end to end, as Accelerate gathers them, are not in the order of positions.

    Args:
        labels: The class of each dataset sample, shape (n,): integers or strings, a list, an array or a
            tensor.
        length: Samples per epoch, over all ranks; default one per label.

    Raises:
        TypeError: `labels` cannot be ordered, or `length` is not an integer.
        ValueError: `labels` is empty or not one-dimensional, has a NaN, or `length` < 1.
    """

    def __init__(self, labels: Sequence[Any] | NDArray[Any], length: int | None = None) -> None:
        array = flat_array("labels", labels, "a non-empty sequence, one label a sample")
        missing = np.flatnonzero(np.not_equal(array, array)) if array.dtype.kind in "fcmMO" else array[:0]
        if missing.size:
            first = int(missing[0])
            bad_value(
                f"labels[{first}]",
                str(array[first]),
                "a class for every sample",
                "Drop unlabelled samples with Subset.",
            )
        self.classes: NDArray[Any]
        try:
            self.classes, inverse = np.unique(array, return_inverse=True)
        except Exception as error:  # noqa: BLE001 - whatever comparing them raises
            raise TypeError(f"labels cannot be put in order: {error}. Pass integers, or pass strings.") from None
        self._labels = len(array)
        # members: dataset indices sorted by class; those of class c are members[first[c] : first[c + 1]].
        self._members: Indices = np.argsort(inverse, kind="stable").astype(np.int64)
        self._first = np.concatenate([[0], np.cumsum(np.bincount(inverse))])
        self._length = (
            None
            if length is None
            else whole_number("length", length, low=1, fix="Leave it out for one sample per label.")
        )

    def _parameters(self) -> tuple[Any, ...]:
        return self.classes, self._members, self._first, self._length

    def __repr__(self) -> str:
        length = "" if self._length is None else f", length={self._length:,}"
        return f"Balanced({self._labels:,} labels of {len(self.classes):,} classes{length})"

    def samples(self, length: int) -> int:
        """Return the samples of one epoch: the order's own `length`, or as many as there are labels.

        Raises:
            ValueError: There is not one label per dataset sample.
        """
        if self._labels != length:
            bad_value(
                "len(labels)",
                self._labels,
                f"one label per sample, len(dataset)={length}",
                "Compute the labels from this dataset.",
            )
        return length if self._length is None else self._length

    def epoch(self, seed: int, epoch: int, length: int) -> EpochOrder:
        """Return this epoch's order; positions beyond the epoch go on with it, still balanced."""
        return _BalancedEpoch(self._members, self._first, seed, epoch)

    def deal(self, seed: int, epoch: int, start: int, stop: int, places: Positions) -> Positions:
        """Return the positions at `places` of the batch sorted by class, the classes in a random order.

        Taking places in turn, each rank then gets of every class its even share, and the leftovers
        fall to other ranks in other batches.
        """
        slots = len(self.classes)
        slot_order = np.argsort(hash64(key("deal", seed, epoch, start), np.arange(slots)), kind="stable")
        # first: where each slot's first position stands in [start, stop); the others follow every `slots`.
        first = start + (slot_order - start) % slots
        counts = np.maximum(-((first - stop) // slots), 0)
        ends = np.cumsum(counts)
        at = np.searchsorted(ends, places, side="right")
        return np.sort(first[at] + slots * (places - (ends - counts)[at]))


class _BalancedEpoch:
    """One epoch's order: position → (class, pass over the class, place in the pass) → dataset index."""

    def __init__(self, members: Indices, first: NDArray[np.int64], seed: int, epoch: int) -> None:
        self._members, self._first, self._words = members, first, (seed, epoch)
        classes = len(first) - 1
        self._slots = permutation(key("slots", seed, epoch), classes)(np.arange(classes))
        self._passes: OrderedDict[tuple[int, int], Indices] = OrderedDict()
        self._cached = 0

    def __call__(self, positions: Positions) -> Indices:
        rounds, slot = np.divmod(positions, len(self._slots))
        classes = self._slots[slot]
        indices = np.empty(len(positions), np.int64)
        by_class = np.argsort(classes, kind="stable")
        cuts = np.flatnonzero(np.diff(classes[by_class])) + 1
        for group in np.split(by_class, cuts) if len(by_class) else []:
            indices[group] = self._of_class(int(classes[group[0]]), rounds[group])
        return indices

    def _of_class(self, label: int, occurrences: Positions) -> Indices:
        """Return the `occurrences`-th draws of one class in this epoch, shape (m,) to (m,)."""
        members = self._members[self._first[label] : self._first[label + 1]]
        passes, places = np.divmod(occurrences, len(members))
        drawn = np.empty(len(occurrences), np.int64)
        for number in np.unique(passes):
            chosen = passes == number
            drawn[chosen] = members[self._in_pass(label, int(number), len(members), places[chosen])]
        return drawn

    def _in_pass(self, label: int, number: int, size: int, places: Positions) -> Indices:
        under = self._pass_key(label, number)
        if size >= SMALL:
            return permutation(under, size)(places)
        table = self._passes.get((label, number))
        if table is None:
            table = permutation(under, size)(np.arange(size))
            self._passes[label, number] = table
            self._cached += size
            while self._cached > _CACHED_ENTRIES:
                self._cached -= len(self._passes.popitem(last=False)[1])
        else:
            self._passes.move_to_end((label, number))
        return table[places]

    def _pass_key(self, label: int, number: int) -> Key:
        return key("pass", *self._words, label, number)
