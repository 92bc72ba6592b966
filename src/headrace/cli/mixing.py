"""`headrace plan --shards`: which shards each rank reads, and how well the order mixes the samples of shards."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from headrace.errors import bad_value
from headrace.plan.blocks import Blocks
from headrace.shards.dataset import TarDataset

LAGS = 50
"""The largest distance at which labels are compared."""

_BATCHES = 256
"""How many batches of a rank are looked at, at most."""

_RANKS = 8
"""How many ranks are looked at, at most."""


@dataclass(frozen=True)
class Locality:
    """Which shards the ranks read in an epoch.

    Attributes:
        shards: The number of each rank's shards, shape (ranks,).
        shared: The number of shards that more than one rank reads.
    """

    shards: NDArray[np.int64]
    shared: int


@dataclass(frozen=True)
class Mixture:
    """How labels follow each other.

    Attributes:
        distinct: The mean number of different labels in a rank's batch.
        expected: The same, if batches were drawn from all samples without replacement.
        correlation: The largest correlation of two labels at a distance of 1 to `LAGS` positions of the epoch: 0 where
            they are equal as often as by chance, 1 where they always are.
    """

    distinct: float
    expected: float
    correlation: float


def order_of_shards(
    shards: str, streams: int | None, window: int, label: str | None
) -> tuple[Blocks, NDArray[Any] | None]:
    """Return the order in which shards are read, and the label of each sample if there is a column for it.

    Raises:
        OSError: A shard cannot be read.
        ValueError: An argument is out of its range, or the index has no such column.
    """
    dataset = TarDataset(shards, streams=streams, window=window)
    return dataset.order, None if label is None else dataset.column(label)


def locality(order: Blocks, seed: int, world_size: int) -> Locality:
    """Count the shards that each rank reads."""
    # Where the world's size does not divide the streams, a rank meets every stream that is congruent to it. Ranks that
    # are congruent to each other meet the same ones.
    step = math.gcd(world_size, order.streams)
    met = []
    for rank in range(step):
        mine = [order.blocks_of(seed, stream) for stream in range(rank, order.streams, step)]
        met.append(np.unique(np.concatenate(mine)))
    readers = np.bincount(np.concatenate(met)) * (world_size // step)
    return Locality(np.tile([len(one) for one in met], world_size // step), int((readers > 1).sum()))


def mixture(order: Blocks, labels: NDArray[Any], seed: int, world_size: int, batch_size: int) -> Mixture:
    """Measure how labels follow each other in the first epoch.

    Raises:
        ValueError: The epoch has not one whole global batch.
    """
    _, classes = np.unique(labels, return_inverse=True)
    total = len(classes)
    epoch = order.epoch(seed, 0, total)
    steps = min(_BATCHES, total // (world_size * batch_size))
    if not steps:
        allowed = f"so many that each of {world_size} ranks gets a whole batch of the {total} samples"
        bad_value("--batch-size", batch_size, allowed, "Pass a smaller one.")
    ranks = np.linspace(0, world_size - 1, min(world_size, _RANKS)).astype(int)
    places = np.arange(steps * batch_size) * world_size
    distinct = [
        len(np.unique(batch)) for rank in ranks for batch in classes[epoch(places + rank)].reshape(steps, batch_size)
    ]
    sequence = classes[epoch(np.arange(min(total, 2**18)))]
    counts = np.bincount(classes)
    by_chance = float((counts / total) @ (counts / total))
    alike = [float((sequence[:-lag] == sequence[lag:]).mean()) for lag in range(1, min(LAGS, len(sequence) - 1) + 1)]
    correlation = max((one - by_chance) / (1 - by_chance) for one in alike) if by_chance < 1 else 0.0
    return Mixture(float(np.mean(distinct)), _expected(counts, batch_size), correlation)


def _expected(counts: NDArray[np.int64], batch_size: int) -> float:
    """Return the expected number of different labels among samples drawn without replacement."""
    total = int(counts.sum())

    def ways(among: int) -> float:
        """The logarithm of the number of batches from so many samples."""
        return math.lgamma(among + 1) - math.lgamma(batch_size + 1) - math.lgamma(among - batch_size + 1)

    missing = [np.exp(ways(total - n) - ways(total)) if total - n >= batch_size else 0.0 for n in counts.tolist()]
    return float(len(counts) - np.sum(missing))


def show_shards(
    order: Blocks, labels: NDArray[Any] | None, seed: int, world_size: int, batch_size: int, console: Console
) -> None:
    """Print how an order of shards divides and mixes them."""
    found = locality(order, seed, world_size)
    samples = int(order.sizes.sum())
    console.print(f"{len(order.sizes):,} shards, {samples:,} samples, {order.streams} streams, window {order.window}")
    console.print(
        f"{world_size} ranks read {found.shards.min()} to {found.shards.max()} shards each, the same ones in every "
        f"epoch; more than one rank reads {found.shared} of the shards",
        soft_wrap=True,
    )
    if order.streams % world_size:
        console.print(
            f"{order.streams} streams cannot be dealt equally to {world_size} ranks. With --streams "
            f"{_multiple(world_size)} each rank has shards of its own.",
            soft_wrap=True,
        )
    if labels is None:
        return
    mixed = mixture(order, labels, seed, world_size, batch_size)
    console.print(
        f"a batch of {batch_size} has {mixed.distinct:.1f} different labels; drawn from all samples it would have "
        f"{mixed.expected:.1f} ({mixed.distinct / mixed.expected:.0%})",
        soft_wrap=True,
    )
    console.print(f"neighbouring labels correlate by at most {mixed.correlation:.3f}, at distances up to {LAGS}")


def _multiple(world_size: int) -> int:
    """Return the smallest multiple of a world's size that is at least 192."""
    return -(-192 // world_size) * world_size
