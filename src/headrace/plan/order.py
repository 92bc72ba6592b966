"""Orders: the epoch's global sequence of sample indices as a pure function of (seed, epoch, position)."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import bad_type, bad_value, check_flag, shown
from headrace.plan.batching import Batching
from headrace.plan.keys import key
from headrace.plan.permute import permutation
from headrace.types import Indices, Positions, Tail

EpochOrder: TypeAlias = Callable[[Positions], Indices]
"""One epoch's order: positions >= 0 in, dataset indices out, shape (n,) to (n,)."""


def flat_array(name: str, values: Any, allowed: str) -> NDArray[Any]:
    """Return an order's argument as an array of shape (n,), n >= 1.

    Raises:
        TypeError: It is no sequence.
        ValueError: It is empty or not one-dimensional, or has masked items.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} is not allowed: expected {allowed}, of one dimension ({error}).") from None
    except Exception as error:  # noqa: BLE001 - such as a tensor's of a dtype that numpy does not have
        fix = f"Pass an array, or tensor.detach().cpu().float() of a tensor ({' '.join(str(error).split())})"
        bad_type(name, values, f"{allowed}, which numpy can hold", f"{fix}.")
    if np.ma.is_masked(values):
        fix = "Give each its own value, such as values.filled(0), or leave them out."
        bad_value(name, values, f"{allowed}, none of them masked", fix)
    if array.ndim == 0:
        bad_type(name, values, allowed, "Pass a list, an array or a tensor.")
    if array.ndim > 1:
        raise ValueError(f"{name} of shape {array.shape} is not allowed: expected {allowed}, of one dimension.")
    if not array.size:
        raise ValueError(f"{name} is empty: expected {allowed}. Check the file or the filter that it comes from.")
    return array


def _described(parameter: Any) -> str:
    if not isinstance(parameter, np.ndarray):
        return repr(parameter)
    # Equal numbers have equal bytes as the widest type of their kind; objects have none.
    kind = parameter.dtype.kind
    wide = parameter.astype({"i": np.int64, "u": np.int64, "f": np.float64}.get(kind, parameter.dtype), copy=False)
    data = repr(wide.tolist()).encode() if kind == "O" else np.ascontiguousarray(wide).view(np.uint8).data
    return f"{len(parameter)}#{hashlib.blake2b(data, digest_size=8).hexdigest()}"


def _brief(parameter: Any) -> str:
    return f"{parameter.size:,} items" if isinstance(parameter, np.ndarray) else shown(parameter)


class Order(ABC):
    """Which sample stands at which global position of an epoch. A value: it holds no seed and no progress.

    A new order is a subclass in a module of its own; a `Plan` needs only `samples` and `epoch` from it. Every epoch has
    the same number of samples. The number of steps may differ by epoch: a `Batching` decides it.
    """

    random: bool = True
    """Whether the sequence changes with seed and epoch."""

    per_rank: int | None = None
    """How many batches of its own each rank takes at a step; None where the loader's `batch_size` cuts the epoch."""

    @abstractmethod
    def samples(self, length: int) -> int:
        """Count the samples of one epoch over a dataset of `length` samples.

        Raises:
            ValueError: The order was made for a dataset of another length.
        """

    @abstractmethod
    def epoch(self, seed: int, epoch: int, length: int) -> EpochOrder:
        """Return the order of one epoch over a dataset of `length` samples.

        The function it returns takes any position >= 0; those at and beyond `samples(length)` are pads.
        """

    def batches(self, seed: int, ranks: int, batch_size: int, tail: Tail) -> Batching | None:
        """Return how the order itself cuts its epochs into global batches; None unless it has `per_rank`.

        Args:
            seed: The plan's seed.
            ranks: The size of the world.
            batch_size: How many of its batches each rank takes at a step.
            tail: The rule for the end of the epoch.
        """
        return None

    def similar(self, seed: int, epoch: int, position: int, samples: int) -> tuple[int, int]:
        """Return the range of positions whose samples may replace that at `position`, if it is broken.

        Args:
            seed: The plan's seed.
            epoch: The epoch.
            position: A position of the epoch, or a pad's.
            samples: The epoch's samples.
        """
        return 0, samples

    def _parameters(self) -> tuple[Any, ...]:
        """Return the numbers and arrays by which two orders of one type are compared."""
        return ()

    @cached_property
    def described(self) -> str:
        """The order in a line, its arrays by size and digest: the same for equal orders, and for no others."""
        return f"{type(self).__qualname__}({', '.join(map(_described, self._parameters()))})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(_brief, self._parameters()))})"

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Order) or type(self) is not type(other):
            return self is other
        mine, theirs = self._parameters(), other._parameters()
        return len(mine) == len(theirs) and all(map(np.array_equal, mine, theirs))

    def __hash__(self) -> int:
        return hash(type(self))

    def deal(self, seed: int, epoch: int, start: int, stop: int, places: Positions) -> Positions:
        """Return the positions at the given places of the global batch [start, stop)'s dealing sequence.

        Ranks take places in turn, so an order that must give each rank a fair mixture arranges the
        batch here; by default the sequence is the positions themselves.

        Args:
            seed: The plan's seed.
            epoch: The epoch.
            start: First position of the global batch.
            stop: Its end, exclusive.
            places: Places in [0, stop - start), shape (n,).
        """
        return places + start


class Sequential(Order):
    """0, 1, 2, … n-1 in every epoch."""

    random = False

    def samples(self, length: int) -> int:
        """Count one epoch: the dataset's own length."""
        return length

    def epoch(self, seed: int, epoch: int, length: int) -> EpochOrder:
        """Return the identity, wrapping round at the dataset's end."""
        return lambda positions: positions % length


class Shuffled(Order):
    """Every sample once per epoch, in an order keyed by (seed, epoch)."""

    def samples(self, length: int) -> int:
        """Count one epoch: the dataset's own length."""
        return length

    def epoch(self, seed: int, epoch: int, length: int) -> EpochOrder:
        """Return this epoch's permutation, wrapping round at the dataset's end."""
        shuffled = permutation(key("shuffle", seed, epoch), length)
        return lambda positions: shuffled(positions % length)


class Subset(Order):
    """Only the given samples of the dataset: a fold, a split, a language.

    Unlike `torch.utils.data.Subset` it leaves the dataset alone, so that indices in errors and states are the
    dataset's own. `DataLoader(..., order=Subset(indices), shuffle=True)` shuffles within it.

    Args:
        indices: Dataset indices, shape (n,), n >= 1; each >= 0. An index that occurs twice is read twice per
            epoch.
        shuffle: Whether each epoch permutes them.

    Raises:
        TypeError: `indices` are not integers, or no sequence.
        ValueError: `indices` is empty, not one-dimensional or has a negative entry.
    """

    def __init__(self, indices: Sequence[int] | NDArray[np.integer], shuffle: bool = False) -> None:
        check_flag("shuffle", shuffle, default=False)
        array = flat_array("indices", indices, "a non-empty sequence of integers")
        if array.dtype.kind not in "iu":
            raise TypeError(
                f"indices of dtype {array.dtype} are not allowed: expected integers. "
                "Turn a mask into indices with numpy.flatnonzero(mask)."
            )
        if array.min() < 0:
            bad_value("indices", int(array.min()), "indices >= 0", "Count from the front of the dataset.")
        self.indices: Indices = array.astype(np.int64)
        self.random = shuffle
        self._within: Order = Shuffled() if shuffle else Sequential()
        self._largest = int(array.max())

    def _parameters(self) -> tuple[Any, ...]:
        return self.indices, self.random

    def __repr__(self) -> str:
        return f"Subset({len(self.indices):,} indices{', shuffle=True' * self.random})"

    def shuffled(self) -> "Subset":
        """Return the same subset, permuted anew in each epoch."""
        return Subset(self.indices, shuffle=True)

    def samples(self, length: int) -> int:
        """Count one epoch: the number of indices.

        Raises:
            ValueError: An index lies beyond the dataset.
        """
        if self._largest >= length:
            bad_value(
                "order=Subset(indices), largest index",
                self._largest,
                f"an index below len(dataset)={length}",
                "Build the subset from this dataset's own indices.",
            )
        return len(self.indices)

    def epoch(self, seed: int, epoch: int, length: int) -> EpochOrder:
        """Return the subset's indices in this epoch's order, wrapping round at their end."""
        within = self._within.epoch(seed, epoch, len(self.indices))
        return lambda positions: self.indices[within(positions)]
