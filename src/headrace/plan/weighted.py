"""Sampling with replacement in proportion to weights, for any number of items and ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import bad_value, whole_number
from headrace.plan.keys import key, uniforms
from headrace.plan.order import EpochOrder, Order, flat_array
from headrace.types import Indices, Positions


class Weighted(Order):
    """Draw samples with replacement, each position independently, in proportion to its weight.

    The counterpart of `torch.utils.data.WeightedRandomSampler`, without its limit of 2^24 items and the same
    for every world: position p draws the same sample whoever evaluates it.

    Args:
        weights: One weight per dataset sample, shape (n,); finite, >= 0, not all 0. They need not sum to 1.
        num_samples: Samples per epoch, over all ranks; default one per weight.

    Raises:
        TypeError: `weights` are not numbers, or `num_samples` is not an integer.
        ValueError: A weight is negative, NaN or infinite; all are zero or there are none; `num_samples` < 1.

    Source: inversion of the cumulative distribution by binary search.
    """

    def __init__(self, weights: Sequence[float] | NDArray[np.floating], num_samples: int | None = None) -> None:
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
        self._num_samples = (
            None
            if num_samples is None
            else whole_number("num_samples", num_samples, low=1, fix="Leave it out for one draw per weight.")
        )

    def _parameters(self) -> tuple[Any, ...]:
        return self._cumulative, self._num_samples

    def __repr__(self) -> str:
        draws = "" if self._num_samples is None else f", num_samples={self._num_samples:,}"
        return f"Weighted({len(self._cumulative):,} weights{draws})"

    def samples(self, length: int) -> int:
        """Count one epoch: `num_samples`, or one per weight.

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
        return length if self._num_samples is None else self._num_samples

    def epoch(self, seed: int, epoch: int, length: int) -> EpochOrder:
        """Return this epoch's draws; positions beyond the epoch are further draws."""
        under = key("weighted", seed, epoch)
        total = self._cumulative[-1]
        below_total = np.nextafter(total, 0)

        def draw(positions: Positions) -> Indices:
            # The first item whose cumulative weight exceeds the draw: never one of weight 0.
            drawn = np.minimum(uniforms(under, positions) * total, below_total)
            indices: Indices = np.searchsorted(self._cumulative, drawn, side="right").astype(np.int64)
            return indices

        return draw
