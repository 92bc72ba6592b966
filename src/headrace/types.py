"""Values that all layers share: the world, the tail rule, tasks, and workers' remarks."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.errors import whole_number

Positions: TypeAlias = NDArray[np.int64]
"""Places in the epoch's global order, shape (n,). A position >= the epoch's samples is a pad."""

Indices: TypeAlias = NDArray[np.int64]
"""Indices of a map-style dataset, shape (n,)."""

Tail: TypeAlias = Literal["pad", "drop", "exact"]
TAILS: tuple[Tail, ...] = get_args(Tail)

OnError: TypeAlias = Literal["raise", "replace"]
ON_ERROR: tuple[OnError, ...] = get_args(OnError)


@dataclass(frozen=True, slots=True)
class World:
    """The share of the data that this process reads: `rank` of `size`.

    Pass one as `DataLoader(..., distributed=World(rank, size))` where the ranks that split the data
    are not those of the default process group (tensor parallelism, a simulation, a test).

    Raises:
        TypeError: Either number is not an integer.
        ValueError: `size` < 1, or `rank` outside [0, size - 1].
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        size = whole_number("size", self.size, low=1, fix="The world has at least one rank.")
        object.__setattr__(self, "size", size)
        rank = whole_number("rank", self.rank, high=size - 1, fix="Ranks count from 0; World(rank, size).")
        object.__setattr__(self, "rank", rank)


# Tasks are tuples because one is made for every batch: a frozen dataclass takes three times as long.


class PlanTask(NamedTuple):
    """Step `step` of an epoch that began at global position `cursor`. The worker computes the indices."""

    epoch: int
    step: int
    cursor: int = 0


class IndexTask(NamedTuple):
    """The index, or list of indices, that a sampler yielded."""

    index: Any


class StreamTask(NamedTuple):
    """The next item, or the next `len(index)` items, of the worker's own copy of an iterable dataset.

    `stream` is the number of the pass: at a new number, a worker starts the dataset again. `epoch` keys
    the pass's random numbers if the loader has a seed.
    """

    stream: int
    epoch: int
    index: Any


class StreamPlace(NamedTuple):
    """The place of a worker's copy of an iterable dataset: its state, or a checksum of the batches before it.

    Attributes:
        of_dataset: The dataset's own state; None if it has none, or is its own iterator.
        of_iterator: Its iterator's own state; None if it has none.
        checksum: The checksum of the pass's batches so far, where there is no state; None if it was not computed.
    """

    of_dataset: Any = None
    of_iterator: Any = None
    checksum: int | None = None


class StreamStart(NamedTuple):
    """The start of a worker's pass over its copy of an iterable dataset.

    Attributes:
        batches: How many of its batches were delivered before.
        read: How many samples those batches had.
        place: The states for `load_state_dict` of the dataset and of its iterator. Without a state, those batches are
            read again and compared with the checksum. Before the first batch, the state is one between two passes.
    """

    batches: int = 0
    read: int = 0
    place: StreamPlace = StreamPlace()


@dataclass(frozen=True)
class Replaced:
    """A sample that could not be fetched and, with `on_error="replace"`, was replaced by another.

    Attributes:
        epoch: The epoch.
        step: The rank's step in it.
        position: The sample's global position in the epoch.
        index: The index that raised.
        substitute: The index that was read instead.
        error: The error in one line: "ValueError: text".
    """

    epoch: int
    step: int
    position: int
    index: int
    substitute: int
    error: str

    def __str__(self) -> str:
        return (
            f"sample {self.index}, position {self.position} of epoch {self.epoch}, step {self.step}, was replaced by "
            f"sample {self.substitute}: {self.error}"
        )


Remark: TypeAlias = str | Replaced
"""A worker's message to the user beside its batch: the text of a warning, or a sample that it replaced."""

Rows: TypeAlias = range | Tensor
"""The indices of one batch of torch's own sampler: a range of step 1, or int64 of shape (n,)."""

Task: TypeAlias = PlanTask | IndexTask | StreamTask | Rows
