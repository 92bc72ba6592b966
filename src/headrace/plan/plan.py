"""The plan: which rank reads which samples at which step, as a pure function."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.errors import bad_type, bad_value, check_flag, whole_number
from headrace.plan.keys import hash64, key
from headrace.plan.order import EpochOrder, Order
from headrace.types import TAILS, Indices, Positions, Tail, World

MAX_SEED = 2**64 - 1

SUBSTITUTES = 8
"""How many other samples are tried in the place of one that cannot be fetched."""

_SUBSTITUTE_DRAWS = 128
"""How many positions are drawn to find them: enough where few samples are left, or one is drawn again and again."""

_EPOCHS_KEPT = 2

_SPAN, _SPAN_STEPS = 8192, 1024
"""At how many positions an order is evaluated in one go, about, and for how many steps at most."""


@dataclass(frozen=True)
class Plan:
    """An order, split into steps over the ranks of a world.

    Rank r of W takes the positions p ≡ r (mod W). A run that begins the epoch at position `cursor` covers at
    step t the global batch [cursor + t·G, cursor + (t+1)·G), where G = W · batch_size. The set of samples in
    a global batch therefore depends on G alone, and a run may go on from any cursor with another world or
    batch size. With `in_runs` the same global batches are dealt in another way, and may go on in either.

    What happens at the end of the epoch is the `tail` rule. For N = 11 samples, W = 4, batch size 2
    (positions shown; 11 is a pad, which reads the order's first sample again):

    | tail | rank 0 | rank 1 | rank 2 | rank 3 | steps |
    | --- | --- | --- | --- | --- | --- |
    | `"pad"` | [0, 4] [8] | [1, 5] [9] | [2, 6] [10] | [3, 7] [11] | 2 on every rank |
    | `"drop"` | [0, 4] | [1, 5] | [2, 6] | [3, 7] | 1 on every rank |
    | `"exact"` | [0, 4] [8] | [1, 5] [9] | [2, 6] [10] | [3, 7] | 2, on rank 3 only 1 |

    In a world larger than the dataset, "pad" gives every rank one sample (some twice over the world), "drop"
    none to anyone, and "exact" one sample to the first N ranks and no step to the others.

    Attributes:
        order: The epoch's global sequence.
        length: Samples in the dataset, >= 1.
        batch_size: Samples per rank and step, >= 1.
        world: Whose share this is.
        tail: "pad", "drop" or "exact".
        seed: Keys the order and all randomness, in [0, 2^64).
        in_runs: Deal each global batch in runs of neighbours instead of in turn: rank r takes the places from
            r · batch_size on. The ranks' batches, laid end to end, are then in the epoch's order with the pads at
            the end, as Accelerate's `gather_for_metrics` expects it. An order with a deal of its own (`Balanced`)
            keeps that, except in a batch that holds pads: laid end to end, its batches are in no particular order.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A value lies outside its range, or the order does not fit the dataset.
    """

    order: Order
    length: int
    batch_size: int = 1
    world: World = World()  # noqa: RUF009 - frozen, so one default may be shared
    tail: Tail = "pad"
    seed: int = 0
    in_runs: bool = False
    samples: int = field(init=False)
    _epochs: dict[int, EpochOrder] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in (("order", Order), ("world", World)):
            if not isinstance(getattr(self, name), kind):
                bad_type(name, getattr(self, name), kind.__name__, f"Pass an instance of headrace.{kind.__name__}.")
        check_flag("in_runs", self.in_runs, default=False)
        empty = "An empty dataset has no order; check the path or the filter that built it."
        numbers = {
            "batch_size": whole_number("batch_size", self.batch_size, low=1, fix="Count samples per rank and step."),
            "seed": whole_number("seed", self.seed, high=MAX_SEED, fix="Any 64-bit number will do."),
            "length": whole_number("len(dataset)", self.length, low=1, fix=empty),
        }
        for name, number in numbers.items():
            object.__setattr__(self, name, number)  # numpy's integers would overflow
        if self.tail not in TAILS:
            bad_value("tail", self.tail, f"one of {TAILS}", 'Choose "pad" for equal steps on all ranks.')
        object.__setattr__(self, "samples", self.order.samples(self.length))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epochs": {}}  # workers build the tables they need

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.world.size * self.batch_size

    def end(self, cursor: int = 0) -> int:
        """Return the position at which the epoch ends: the samples that are read, pads included."""
        left = self.samples - cursor
        if self.tail == "drop":
            return cursor + left // self.global_batch * self.global_batch
        if self.tail == "pad":
            return cursor - (-left // self.world.size) * self.world.size
        return self.samples

    def share(self, cursor: int = 0) -> int:
        """Count the samples this rank reads in an epoch begun at `cursor`, pads included.

        Raises:
            ValueError: `cursor` lies outside [0, samples].
        """
        self._check(cursor)
        end = self.end(cursor)
        whole, rest = divmod(end - cursor, self.global_batch)
        return whole * self.batch_size + len(self._places(end - rest, end))

    def steps(self, cursor: int = 0) -> int:
        """Count this rank's steps in an epoch begun at `cursor`, as `share` counts its samples."""
        return -(-self.share(cursor) // self.batch_size)

    def size(self, step: int, cursor: int = 0) -> int:
        """Count the samples this rank reads at a step."""
        start = cursor + step * self.global_batch
        stop = start + self.global_batch
        return self.batch_size if stop <= self.samples else len(self._places(start, min(stop, self.end(cursor))))

    def positions(self, epoch: int, step: int, cursor: int = 0) -> Positions:
        """Return the global positions this rank reads at a step; those >= `samples` are pads.

        Args:
            epoch: The epoch, from 0.
            step: Steps since `cursor`, in [0, steps(cursor)).
            cursor: Where the run began the epoch, in samples over all ranks.

        Returns:
            Shape (batch_size,), or fewer at the last step.

        Raises:
            IndexError: The rank has no such step.
        """
        self._check(cursor)
        start = cursor + step * self.global_batch
        stop = min(start + self.global_batch, self.end(cursor))
        places = _array(self._places(start, stop))
        if step < 0 or not len(places):
            raise IndexError(
                f"step {step} is out of range: rank {self.world.rank} of {self.world.size} has "
                f"{self.steps(cursor)} steps from position {cursor} of {self.samples}"
            )
        if self._in_runs(stop):
            return places + start
        return self.order.deal(self.seed, epoch, start, stop, places)

    def span(self, epoch: int, step: int, cursor: int = 0, most: int = _SPAN_STEPS) -> tuple[Positions, Indices]:
        """Return the positions and dataset indices of several steps from `step` on, evaluated together.

        An order costs far less in bulk: a shuffle of 256 positions at a time takes six times as long as of 8,192.

        Args:
            epoch: The epoch, from 0.
            step: The first step, as for `positions`.
            cursor: Likewise.
            most: No more steps than this.

        Returns:
            Shape (n,) each: all steps' in turn, `batch_size` for each but the epoch's last, which may have fewer.

        Raises:
            IndexError: The rank has no such step.
        """
        positions = self.positions(epoch, step, cursor)
        start = cursor + step * self.global_batch
        steps = min(max(1, _SPAN // self.batch_size), most)
        stop = min(start + steps * self.global_batch, self.end(cursor))
        default = type(self.order).deal is Order.deal
        if default and self.in_runs:
            last = stop - (stop - start) % self.global_batch
            firsts = np.arange(start, last, self.global_batch) + self.world.rank * self.batch_size
            rows = np.add.outer(firsts, np.arange(self.batch_size))
            positions = np.append(rows, _array(self._places(last, stop)) + last)
        elif default:
            positions = _array(self._places(start, stop)) + start
        return positions, self.indices(epoch, positions)

    def batch(self, epoch: int, step: int, cursor: int = 0) -> Indices:
        """Return the dataset indices this rank reads at a step, shape (batch_size,) or fewer at the last."""
        return self.indices(epoch, self.positions(epoch, step, cursor))

    def indices(self, epoch: int, positions: Positions) -> Indices:
        """Return the dataset indices at any positions of an epoch, shape (n,) to (n,)."""
        order = self._epochs.get(epoch)
        if order is None:
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            order = self._epochs[epoch] = self.order.epoch(self.seed, epoch, self.length)
        return order(positions)

    def substitutes(self, epoch: int, position: int) -> list[int]:
        """Return the dataset indices to try, in this order, where the sample at a position cannot be fetched.

        They are read from the same epoch's order at positions keyed by (seed, epoch, position), each another sample;
        `SUBSTITUTES` of them, or fewer where the order has no more.
        """
        drawn = hash64(key("substitute", self.seed, epoch, position), np.arange(_SUBSTITUTE_DRAWS))
        positions = (drawn % np.uint64(self.samples)).astype(np.int64)
        broken, *others = self.indices(epoch, np.append(position, positions)).tolist()
        return [index for index in dict.fromkeys(others) if index != broken][:SUBSTITUTES]

    def cursor_after(self, step: int, cursor: int = 0) -> int:
        """Return the position up to which all ranks together have read after a step; `samples` means done."""
        reached = cursor + (step + 1) * self.global_batch
        return self.samples if reached >= self.end(cursor) else reached

    def _check(self, cursor: int) -> None:
        whole_number("cursor", cursor, high=self.samples, fix="It counts the epoch's samples already read.")

    def _in_runs(self, stop: int) -> bool:
        """Tell whether the global batch that ends at `stop` is dealt in runs."""
        return self.in_runs and (stop > self.samples or type(self.order).deal is Order.deal)

    def _places(self, start: int, stop: int) -> range:
        """Return this rank's places in the global batch [start, stop)."""
        rank, size = self.world.rank, self.world.size
        if not self._in_runs(stop):
            return range((rank - start) % size, stop - start, size)
        share, more = divmod(stop - start, size)  # the first ranks take one more
        first = rank * share + min(rank, more)
        return range(first, first + share + (rank < more))


def _array(places: range) -> Positions:
    return np.arange(places.start, places.stop, places.step)
