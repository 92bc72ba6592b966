"""Batches of similar length: padding, equal work for all ranks, the budget, and the time to the first batch."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, DistributedSampler

from benchmarks.rows import Row, Runs, compared, in_turn
from headrace import DataLoader, LengthBucketed, World

SAMPLES, RANKS, BUDGET, BATCH_SIZE = 10**6, 8, 16_384, 32
WINDOW = 100 * BATCH_SIZE
RUNS = 3

Batches = Iterable[NDArray[np.int64]]


def lengths_of(seed: int) -> NDArray[np.int64]:
    """Return log-normal lengths in tokens: half of them below 245, some of 8,000."""
    drawn = np.random.default_rng(seed).lognormal(5.5, 0.8, SAMPLES)
    return np.clip(drawn.astype(np.int64) + 1, 1, 8000)


class Lengths(Dataset[int]):
    """A dataset whose samples are their own numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitems__(self, indices: list[int]) -> NDArray[np.int64]:
        """Return the numbers, shape (n,)."""
        return np.asarray(indices)

    def __getitem__(self, index: int) -> int:
        return index


def ours(lengths: NDArray[np.int64], epoch: int, **size: Any) -> list[Batches]:
    """Return each rank's batches by `LengthBucketed`."""
    order = LengthBucketed(lengths, **size)
    loaders: list[Any] = [
        DataLoader(Lengths(), order=order, collate_fn=np.asarray, seed=0, distributed=World(rank, RANKS))
        for rank in range(RANKS)
    ]
    for loader in loaders:
        loader.set_epoch(epoch)
    return loaders


def shuffled(epoch: int) -> list[NDArray[np.int64]]:
    """Return each rank's samples by torch's DistributedSampler."""
    shares = []
    for rank in range(RANKS):
        sampler: DistributedSampler[int] = DistributedSampler(Lengths(), RANKS, rank, shuffle=True)
        sampler.set_epoch(epoch)
        shares.append(np.fromiter(sampler, np.int64))
    return shares


def cut(share: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Cut a rank's samples into batches of equal size."""
    return [share[start : start + BATCH_SIZE] for start in range(0, len(share), BATCH_SIZE)]


def random_batches(lengths: NDArray[np.int64], epoch: int) -> list[Batches]:
    """Return each rank's batches as torch's loader cuts them."""
    return [cut(share) for share in shuffled(epoch)]


def sorted_windows(lengths: NDArray[np.int64], epoch: int) -> list[Batches]:
    """Return each rank's batches, of windows of its shuffled samples that are sorted by length: the usual recipe."""
    chance = np.random.default_rng(epoch)
    ranks: list[Batches] = []
    for share in shuffled(epoch):
        batches: list[NDArray[np.int64]] = []
        for start in range(0, len(share), WINDOW):
            window = share[start : start + WINDOW]
            parts = cut(window[np.argsort(lengths[window], kind="stable")])
            batches += [parts[place] for place in chance.permutation(len(parts))]
        ranks.append(batches)
    return ranks


def figures(lengths: NDArray[np.int64], ranks: list[Batches]) -> tuple[float, ...]:
    """Return the share of padding, and how much longer the slowest rank's batch is than the mean rank's, in percent."""
    costs = [
        [(len(batch) * int(lengths[batch].max()), int(lengths[batch].sum())) for batch in batches] for batches in ranks
    ]
    padded = sum(cost for rank in costs for cost, _ in rank)
    filled = sum(tokens for rank in costs for _, tokens in rank)
    at_a_step = np.array([[cost for cost, _ in step] for step in zip(*costs, strict=False)])
    waited = (at_a_step.max(1) - at_a_step.mean(1)).sum() / at_a_step.mean(1).sum()
    return 100 * (1 - filled / padded), 100 * float(waited)


def lhotses(lengths: NDArray[np.int64], epoch: int) -> Iterator[NDArray[np.int64]]:
    """Yield the first rank's batches by lhotse's sampler, with frames as seconds."""
    from lhotse import MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    class Cuts:
        is_lazy = True

        def __iter__(self) -> Iterator[Any]:
            return (MonoCut(str(number), 0, float(length), 0) for number, length in enumerate(lengths))

    options = {
        "max_duration": BUDGET,
        "num_buckets": 30,
        "shuffle": True,
        "world_size": RANKS,
        "rank": 0,
        "seed": epoch,
    }
    for batch in DynamicBucketingSampler(Cuts(), **options):
        yield np.array([int(one.id) for one in batch])


def first_rank(lengths: NDArray[np.int64], batches: Batches, begun: float) -> tuple[float, ...]:
    """Return one rank's padding in percent, its largest batch in padded tokens, and milliseconds to its first batch."""
    costs, first_ms = [], 0.0
    for batch in batches:
        first_ms = first_ms or 1000 * (time.perf_counter() - begun)
        costs.append((len(batch) * int(lengths[batch].max()), int(lengths[batch].sum())))
    padded = sum(cost for cost, _ in costs)
    return 100 * (1 - sum(tokens for _, tokens in costs) / padded), max(cost for cost, _ in costs), first_ms


def lengths() -> Iterator[Row]:
    """Compare with batches of random samples, with sorted windows, and with lhotse's DynamicBucketingSampler."""
    of = lengths_of(0)
    names = {
        "padding, 10^6 log-normal lengths, 8 ranks": "%",
        "slowest rank over the mean rank, each step": "%",
    }
    epochs: dict[str, Iterator[int]] = {name: iter(range(RUNS)) for name in ("ours", "fixed", "random", "sorted")}
    taken: dict[str, Runs] = in_turn(
        {
            "ours": lambda: figures(of, ours(of, next(epochs["ours"]), max_tokens=BUDGET)),
            "fixed": lambda: figures(of, ours(of, next(epochs["fixed"]), batch_size=BATCH_SIZE)),
            "random": lambda: figures(of, random_batches(of, next(epochs["random"]))),
            "sorted": lambda: figures(of, sorted_windows(of, next(epochs["sorted"]))),
        },
        RUNS,
    )
    yield from compared(names, taken["ours"], taken["random"], "random batches of 32")
    yield from compared(names, taken["ours"], taken["sorted"], "sorted windows, batches of 32")
    fixed = {f"{name}, batches of 32": unit for name, unit in names.items()}
    yield from compared(fixed, taken["fixed"], taken["sorted"], "sorted windows, batches of 32")

    def ours_first() -> tuple[float, ...]:
        begun = time.perf_counter()
        return first_rank(of, ours(of, 0, max_tokens=BUDGET)[0], begun)

    def lhotses_first() -> tuple[float, ...]:
        begun = time.perf_counter()
        return first_rank(of, lhotses(of, 0), begun)

    first = {
        "padding of one rank of 8": "%",
        "largest batch under a budget of 16,384": "tok",
        "first batch of 10^6 lengths": "ms",
    }
    both = in_turn({"ours": ours_first, "lhotse": lhotses_first}, 1)
    yield from compared(first, both["ours"], both["lhotse"], "lhotse DynamicBucketingSampler")
