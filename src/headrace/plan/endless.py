"""Epochs of any number of samples, cut from an endless sequence."""

from collections import OrderedDict
from typing import Any

import numpy as np

from headrace.errors import bad_value, whole_number
from headrace.plan.order import EpochOrder, Order
from headrace.types import Indices, Positions

_PASSES_KEPT = 3


class Endless(Order):
    """The epochs of another order, end to end, cut anew into epochs of `epoch_samples` samples.

    Position p of epoch e is place e · epoch_samples + p of that sequence. If an epoch of the order has every sample
    once, every sample comes before any comes again, whatever `epoch_samples` is. An epoch of `Blocks` keeps its ranks
    apart only if `epoch_samples` and the number of samples are multiples of its streams.

    Args:
        order: The order whose epochs follow each other.
        epoch_samples: The samples of an epoch, over all ranks, >= 1; more than the dataset has, or fewer.

    Raises:
        TypeError: `epoch_samples` is not an integer.
        ValueError: `epoch_samples` < 1, or the order deals or cuts its own batches.
    """

    def __init__(self, order: Order, epoch_samples: int) -> None:
        fix = "Count the samples of an epoch over all ranks."
        self._samples = whole_number("epoch_samples", epoch_samples, low=1, high=2**62, fix=fix)
        if order.per_rank is not None or type(order).deal is not Order.deal:
            fix = "Leave it out. Balanced(labels, length=...) has epochs of any length."
            bad_value("epoch_samples", epoch_samples, f"None with order={order!r}, which arranges its own batches", fix)
        self._order, self.random = order, order.random
        self._passes: OrderedDict[tuple[int, int, int], EpochOrder] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_passes": OrderedDict()}

    def _parameters(self) -> tuple[Any, ...]:
        return self._order.described, self._samples

    def __repr__(self) -> str:
        return f"Endless({self._order!r}, {self._samples:,})"

    def samples(self, length: int) -> int:
        """Count one epoch: `epoch_samples`.

        Raises:
            ValueError: The order was made for a dataset of another length.
        """
        self._order.samples(length)
        return self._samples

    def epoch(self, seed: int, epoch: int, length: int) -> EpochOrder:
        """Return one epoch's part of the sequence, wrapping round at its end."""
        size = self._order.samples(length)
        before, first = divmod(epoch * self._samples, size)  # in Python's integers, which do not overflow

        def indices(positions: Positions) -> Indices:
            passes, places = np.divmod(positions % self._samples + first, size)
            found = np.empty(len(positions), np.int64)
            for number in np.unique(passes).tolist():
                chosen = passes == number
                found[chosen] = self._pass(seed, before + number, length)(places[chosen])
            return found

        return indices

    def _pass(self, seed: int, number: int, length: int) -> EpochOrder:
        order = self._passes.get((seed, number, length))
        if order is None:
            order = self._passes[seed, number, length] = self._order.epoch(seed, number, length)
            while len(self._passes) > _PASSES_KEPT:
                self._passes.popitem(last=False)
        return order
