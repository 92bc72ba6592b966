"""The plan: which rank reads which samples at which step, as a pure function."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.errors import bad_type, bad_value, check_flag, whole_number
from headrace.plan.batching import Batching, EvenBatches
from headrace.plan.keys import hash64, key
from headrace.plan.order import EpochOrder, Order
from headrace.types import TAILS, Indices, Positions, Tail, World

MAX_SEED = 2**64 - 1

SUBSTITUTES = 8
"""The number of substitutes that are tried for a sample that cannot be fetched."""

_SUBSTITUTE_DRAWS = 128
"""The number of positions that are drawn to find them: more, since draws may repeat."""

_EPOCHS_KEPT = 2

_SPAN, _SPAN_STEPS = 8192, 1024
"""About how many positions, and at most how many steps, of an order are evaluated at once."""


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
        batching: Cuts the epoch's positions into global batches: `EvenBatches`, or another `Batching`. An order that
            cuts its epochs itself (`LengthBucketed`) comes before it; `batch_size` then counts the order's batches.

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
    batching: type[Batching] = EvenBatches
    samples: int = field(init=False)
    _batches: Batching = field(init=False, repr=False, compare=False)
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
        if not isinstance(self.tail, str) or self.tail not in TAILS:
            bad_value("tail", self.tail, f"one of {TAILS}", 'Choose "pad" for equal steps on all ranks.')
        object.__setattr__(self, "samples", self.order.samples(self.length))
        if not (isinstance(self.batching, type) and issubclass(self.batching, Batching)):
            bad_type("batching", self.batching, "a subclass of Batching", "Leave it out for batches of equal size.")
        batches = self.order.batches(self.seed, self.world.size, self.batch_size, self.tail)
        if batches is None:
            batches = self.batching(self.samples, self.world.size, self.batch_size, self.tail)
        object.__setattr__(self, "_batches", batches)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epochs": {}}  # workers build the tables they need

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks, where every step has as many."""
        return self.world.size * self.batch_size

    @property
    def even(self) -> bool:
        """Whether this rank reads `batch_size` samples at every step but the epoch's last."""
        return self._batches.even

    def end(self, epoch: int, cursor: int = 0) -> int:
        """Return the position at which the epoch ends: the samples that are read, pads included."""
        return self._batches.end(epoch, cursor)

    def share(self, epoch: int, cursor: int = 0) -> int:
        """Count the samples this rank reads in an epoch begun at `cursor`, pads included.

        Raises:
            ValueError: `cursor` lies outside [0, samples].
        """
        self._check(cursor)
        steps = self._batches.steps(epoch, cursor)
        if not self.even:
            return sum(self.size(epoch, step, cursor) for step in range(steps))
        if not steps:
            return 0
        start, stop = self._batches.bounds(epoch, steps - 1, cursor)
        return (start - cursor) // self.world.size + len(self._places(start, stop))

    def steps(self, epoch: int, cursor: int = 0) -> int:
        """Count this rank's steps in an epoch begun at `cursor`.

        Raises:
            ValueError: `cursor` lies outside [0, samples].
        """
        self._check(cursor)
        steps = self.most_steps(epoch, cursor)
        # Only the last global batch can be too small for every rank to get a sample.
        return steps - (steps > 0 and not self._places(*self._batches.bounds(epoch, steps - 1, cursor)))

    def most_steps(self, epoch: int, cursor: int = 0) -> int:
        """Count the steps of the ranks that have most: the global batches of an epoch begun at `cursor`."""
        return self._batches.steps(epoch, cursor)

    def remainder(self, epoch: int, cursor: int = 0) -> int:
        """Count the samples of the last global batch that are no pads.

        It is 0 if there is no such batch, with `tail="drop"`, and where batches are `even` and the last is whole.
        """
        steps = self._batches.steps(epoch, cursor)
        if not steps or self.tail == "drop":
            return 0
        start, _ = self._batches.bounds(epoch, steps - 1, cursor)
        last = self.samples - start
        return last % self.global_batch if self.even else last

    def size(self, epoch: int, step: int, cursor: int = 0) -> int:
        """Count the samples this rank reads at a step."""
        start, stop = self._batches.bounds(epoch, step, cursor)
        share, more = divmod(stop - start, self.world.size)
        return len(self._places(start, stop)) if more else max(0, share)

    def positions(self, epoch: int, step: int, cursor: int = 0) -> Positions:
        """Return the global positions this rank reads at a step; those >= `samples` are pads.

        Args:
            epoch: The epoch, from 0.
            step: Steps since `cursor`, in [0, steps(epoch, cursor)).
            cursor: The position at which the run began the epoch.

        Returns:
            Shape (batch_size,), or fewer at the last step.

        Raises:
            IndexError: The rank has no such step.
        """
        self._check(cursor)
        start, stop = self._batches.bounds(epoch, step, cursor)
        places = _array(self._places(start, stop))
        if step < 0 or not len(places):
            raise IndexError(
                f"step {step} is out of range: rank {self.world.rank} of {self.world.size} has "
                f"{self.steps(epoch, cursor)} steps from position {cursor} of {self.samples}"
            )
        if self._in_runs(stop):
            return places + start
        return self.order.deal(self.seed, epoch, start, stop, places)

    def span(self, epoch: int, step: int, cursor: int = 0, most: int = _SPAN_STEPS) -> tuple[Positions, Indices]:
        """Return the positions and dataset indices of several steps from `step` on, evaluated together.

        Evaluating an order for many positions at once costs far less: a shuffle of 256 positions at a time takes six
        times as long as of 8,192.

        Args:
            epoch: The epoch, from 0.
            step: The first step, as for `positions`.
            cursor: As for `positions`.
            most: The largest number of steps; 1 where steps are not `even`.

        Returns:
            Shape (n,) each: all steps' in turn, `batch_size` for each but the epoch's last, which may have fewer.

        Raises:
            IndexError: The rank has no such step.
        """
        positions = self.positions(epoch, step, cursor)
        if self.even and type(self.order).deal is Order.deal:
            start, _ = self._batches.bounds(epoch, step, cursor)
            steps = min(max(1, _SPAN // self.batch_size), most)
            _, stop = self._batches.bounds(epoch, step + steps - 1, cursor)
            stop = min(stop, self.end(epoch, cursor))
            if self.in_runs:
                last = stop - (stop - start) % self.global_batch
                firsts = np.arange(start, last, self.global_batch) + self.world.rank * self.batch_size
                rows = np.add.outer(firsts, np.arange(self.batch_size))
                positions = np.append(rows, _array(self._places(last, stop)) + last)
            else:
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
        start, stop = self.order.similar(self.seed, epoch, position, self.samples)
        positions = start + (drawn % np.uint64(stop - start)).astype(np.int64)
        broken, *others = self.indices(epoch, np.append(position, positions)).tolist()
        return [index for index in dict.fromkeys(others) if index != broken][:SUBSTITUTES]

    def cursor_after(self, epoch: int, step: int, cursor: int = 0) -> int:
        """Return the position up to which all ranks together have read after a step; `samples` means done."""
        _, stop = self._batches.bounds(epoch, step, cursor)
        following, end = self._batches.bounds(epoch, step + 1, cursor)
        return stop if following < end else self.samples

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
