"""Sampling in proportion to weights, with and without replacement, for any number of items and ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import bad_value, check_flag, whole_number
from headrace.plan.keys import Key, key, uniforms
from headrace.plan.order import EpochOrder, Order, flat_array
from headrace.types import Indices, Positions


class Weighted(Order):
    """Draw samples in proportion to their weights: with replacement each position independently, else each sample once.

    The counterpart of `torch.utils.data.WeightedRandomSampler`, without its limit of 2^24 items and the same
    for every world: position p draws the same sample whoever evaluates it. Without replacement a heavy sample comes
    early in the epoch rather than often; the first n positions are a weighted sample of n. That takes 8 bytes and less
    than 0.5 us a sample for each epoch, in every process that evaluates the order.

    Args:
        weights: One weight per dataset sample, shape (n,); finite, >= 0, not all 0. They need not sum to 1.
        num_samples: Samples per epoch, over all ranks. By default one per weight; without replacement one per weight
            > 0, which is also the most.
        replacement: Whether a sample may be drawn again in the same epoch.

    Raises:
        TypeError: `weights` are not numbers, `num_samples` is not an integer, or `replacement` is not a boolean.
        ValueError: A weight is negative, NaN or infinite; all are zero or there are none; `num_samples` < 1, or more
            than can be drawn.

    Source: with replacement, inversion of the cumulative distribution by binary search; without, Efraimidis and
    Spirakis, "Weighted random sampling with a reservoir" (2006), its keys as logarithms.
    """

    def __init__(
        self,
        weights: Sequence[float] | NDArray[np.floating],
        num_samples: int | None = None,
        replacement: bool = True,
    ) -> None:
        check_flag("replacement", replacement, default=True)
        array = flat_array("weights", weights, "a non-empty sequence of numbers")
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"weights of dtype {array.dtype} are not allowed: expected real numbers >= 0. "
                "Pass one number per dataset sample."
            )
        array = array.astype(np.float64)
        wrong = np.flatnonzero(~np.isfinite(array) | (array < 0))
        if wrong.size:
            first = int(wrong[0])
            bad_value(
                f"weights[{first}]",
                float(array[first]),
                "finite numbers >= 0",
                f"{wrong.size} of {array.size} weights are negative, NaN or infinite.",
            )
        if not array.any():
            raise ValueError("weights are all zero: expected at least one weight > 0. Nothing could ever be drawn.")
        # Scaled by a power of two, which rounds nothing, so that neither huge nor tiny weights leave the range.
        self._cumulative: NDArray[np.float64] = np.cumsum(np.ldexp(array, -int(np.frexp(array.max())[1])))
        self._replacement = replacement
        self._logs = np.log(array[array > 0]) if not replacement else array[:0]
        self._drawable: Indices = np.flatnonzero(array) if not replacement else np.arange(0)
        most = None if replacement else len(self._drawable)
        fix = "Leave it out for one draw per weight." if replacement else "Weights of 0 are never drawn."
        self._num_samples = (
            None if num_samples is None else whole_number("num_samples", num_samples, low=1, high=most, fix=fix)
        )

    def _parameters(self) -> tuple[Any, ...]:
        with_replacement = self._cumulative, self._num_samples
        return with_replacement if self._replacement else (*with_replacement, False)

    def __repr__(self) -> str:
        draws = "" if self._num_samples is None else f", num_samples={self._num_samples:,}"
        return f"Weighted({len(self._cumulative):,} weights{draws}{'' if self._replacement else ', replacement=False'})"

    def samples(self, length: int) -> int:
        """Count one epoch: `num_samples`, or one per weight that can be drawn.

        Raises:
            ValueError: There is not one weight per dataset sample.
        """
        if len(self._cumulative) != length:
            bad_value(
                "len(weights)",
                len(self._cumulative),
                f"one weight per sample, len(dataset)={length}",
                "Compute the weights from this dataset.",
            )
        if self._num_samples is not None:
            return self._num_samples
        return length if self._replacement else len(self._drawable)

    def epoch(self, seed: int, epoch: int, length: int) -> EpochOrder:
        """Return this epoch's draws; positions beyond the epoch are further draws, or the first samples again."""
        if not self._replacement:
            return self._without_replacement(key("weighted, each once", seed, epoch))
        under = key("weighted", seed, epoch)
        total = self._cumulative[-1]
        below_total = np.nextafter(total, 0)

        def draw(positions: Positions) -> Indices:
            # The first item whose cumulative weight exceeds the draw: never one of weight 0.
            drawn = np.minimum(uniforms(under, positions) * total, below_total)
            indices: Indices = np.searchsorted(self._cumulative, drawn, side="right").astype(np.int64)
            return indices

        return draw

    def _without_replacement(self, under: Key) -> EpochOrder:
        """Return the order in which the samples come whose exponential waiting times have their weights as rates."""
        with np.errstate(divide="ignore"):  # a waiting time of 0 comes first
            waits = np.log(-np.log1p(-uniforms(under, self._drawable))) - self._logs
        in_turn = self._drawable[np.argsort(waits, kind="stable")]
        count = self.samples(len(self._cumulative))
        return lambda positions: in_turn[positions % count]
