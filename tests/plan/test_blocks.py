"""The order of blocks: every sample once, ranks in blocks of their own, and the same sequence for every world."""

import hashlib
import pickle
import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Plan
from headrace.plan.blocks import Blocks
from headrace.types import World

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any)


def epoch_of(order: Blocks, seed: int = 0, epoch: int = 0) -> np.ndarray[Any, Any]:
    total = int(order.sizes.sum())
    return order.epoch(seed, epoch, total)(np.arange(total))


@given(SIZES, st.integers(1, 50), st.integers(1, 40), st.integers(0, 2**64 - 1), st.integers(0, 5))
def test_reads_every_sample_once_and_wraps_round(
    sizes: list[int], streams: int, window: int, seed: int, epoch: int
) -> None:
    order, total = Blocks(sizes, streams, window), sum(sizes)
    seen = epoch_of(order, seed, epoch)
    assert sorted(seen) == list(range(total))
    assert order.epoch(seed, epoch, total)(np.arange(total, 2 * total)).tolist() == seen.tolist()


@given(SIZES, st.integers(1, 20), st.integers(1, 40), st.data())
def test_positions_can_be_asked_for_in_any_order(sizes: list[int], streams: int, window: int, data: Any) -> None:
    order, total = Blocks(sizes, streams, window), sum(sizes)
    whole, one = epoch_of(order, 3, 1), order.epoch(3, 1, total)
    for _ in range(3):
        positions = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=10)), np.int64)
        assert one(positions).tolist() == whole[positions].tolist()


@given(SIZES, st.integers(1, 20), st.integers(1, 40), st.integers(0, 2**64 - 1))
def test_a_stream_reads_the_same_samples_in_every_epoch(sizes: list[int], streams: int, window: int, seed: int) -> None:
    order = Blocks(sizes, streams, window)
    block = np.repeat(np.arange(len(sizes)), sizes)
    for stream in range(streams):
        first, second = (epoch_of(order, seed, epoch)[stream::streams] for epoch in (0, 1))
        assert sorted(first) == sorted(second)
        assert sorted(set(block[first])) == order.blocks_of(seed, stream).tolist()


def test_ranks_share_a_block_only_at_the_cuts() -> None:
    order = Blocks(np.full(200, 50), streams=48, window=64)
    for size in (1, 2, 3, 16, 48):
        readers: dict[int, set[int]] = {}
        for rank in range(size):
            plan = Plan(order, 10_000, 8, World(rank, size))
            for stream in range(rank, 48, size):
                for block in order.blocks_of(plan.seed, stream):
                    readers.setdefault(int(block), set()).add(rank)
        shared = sum(len(ranks) - 1 for ranks in readers.values())
        assert shared <= 47, "each cut between two runs divides one block at most"


def test_64_ranks_read_few_of_1281_shards_and_the_same_ones_in_each_epoch() -> None:
    sizes = np.random.default_rng(0).integers(900, 1101, 1281)
    total, ends, ranks = int(sizes.sum()), np.cumsum(sizes), 64

    def read(epoch: int) -> list[set[int]]:
        """Return the shards that each rank reads."""
        at = Blocks(sizes).epoch(0, epoch, total)
        parts = [at(np.arange(start, min(start + 2**16, total))) for start in range(0, total, 2**16)]
        shards = np.searchsorted(ends, np.concatenate(parts), "right")
        return [set(np.unique(shards[rank::ranks]).tolist()) for rank in range(ranks)]

    first = read(0)
    assert set().union(*first) == set(range(len(sizes)))
    own_streams = 192 // ranks
    for number, mine in enumerate(first):
        shared = mine & set().union(*(theirs for other, theirs in enumerate(first) if other != number))
        assert len(shared) <= 2 * own_streams  # one at each end of a stream
        assert len(mine) <= len(sizes) / ranks + 2 * own_streams
    assert read(5) == first


def test_a_window_holds_neighbours_of_a_stream() -> None:
    """What a stream reads in a window are whole pieces, but for those at the window's ends."""
    order = Blocks(np.full(100, 20), streams=2, window=100)
    block = np.repeat(np.arange(100), 20)
    for window in range(10):
        for stream in range(2):
            of_stream = epoch_of(order)[stream::2][window * 100 : (window + 1) * 100]
            assert len(set(block[of_stream])) <= 6


@pytest.mark.parametrize("along", ["seed", "epoch"])
def test_each_seed_and_each_epoch_has_an_order_of_its_own(along: str) -> None:
    order = Blocks(np.full(30, 40), streams=4, window=100)
    orders = [epoch_of(order, **{along: number}).tolist() for number in range(6)]
    assert len({tuple(one) for one in orders}) == 6
    for one, other in pairwise(orders):
        assert np.mean(np.equal(one, other)) < 0.02
    steps = [np.mean(np.diff(one) == 1) for one in orders]
    assert max(steps) < 0.02, "neighbours of the data are no neighbours of the order"


def test_the_world_changes_nothing() -> None:
    order = Blocks([70, 0, 13, 200, 1, 96], streams=12, window=16)
    whole = epoch_of(order, 5)
    for size in (1, 2, 3, 5, 12, 24):
        ranks = [Plan(order, 380, 4, World(rank, size), "exact", 5) for rank in range(size)]
        read = [plan.indices(0, plan.positions(0, step)) for plan in ranks for step in range(plan.steps(0))]
        assert sorted(np.concatenate(read)) == sorted(whole)


def test_numbers_are_frozen() -> None:
    """States of older releases go on with the same samples."""
    order = Blocks([5, 3, 8, 4], streams=3, window=4)
    assert epoch_of(order, 7, 0).tolist() == [16, 9, 3, 7, 11, 1, 6, 8, 0, 5, 10, 2, 17, 12, 4, 19, 14, 15, 18, 13]
    assert order.described == "Blocks(4#bb22f3a7897b359e, 3, 4)"
    large = epoch_of(Blocks(np.arange(1, 400)), 1, 2)
    assert hashlib.sha256(large.astype("<i8").tobytes()).hexdigest()[:16] == "a6d3a27d58e1c734"


@pytest.mark.parametrize("sizes", [[1] * 5, [3], [0, 2, 0]])
@pytest.mark.parametrize("streams", [1, 2, 7, 1000])
def test_fewer_samples_than_streams(sizes: list[int], streams: int) -> None:
    assert sorted(epoch_of(Blocks(sizes, streams))) == list(range(sum(sizes)))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"sizes": []}, ValueError, "sizes is empty"),
        ({"sizes": [0, 0]}, ValueError, "all 0"),
        ({"sizes": [3, -1]}, ValueError, "-1"),
        ({"sizes": [1.5]}, TypeError, "float64"),
        ({"sizes": 5}, TypeError, "sizes"),
        ({"sizes": [[1], [2]]}, ValueError, "one dimension"),
        ({"sizes": [5], "streams": 0}, ValueError, "streams"),
        ({"sizes": [5], "window": 0}, ValueError, "window"),
        ({"sizes": [5], "window": 1.5}, TypeError, "window"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Blocks(**arguments)


def test_another_datasets_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sum of sizes.*len\(dataset\)=9"):
        Plan(Blocks([4, 4]), 9)


def test_travels_and_compares_as_a_value() -> None:
    one = Blocks([4, 4], streams=2)
    assert pickle.loads(pickle.dumps(one)) == one == Blocks(np.array([4, 4]), streams=2)
    assert one != Blocks([4, 5], streams=2)
    assert one != Blocks([4, 4], streams=3)
    assert one != Blocks([4, 4], streams=2, window=3)
    assert repr(one) == "Blocks(2 blocks, streams=2, window=2048)"


@pytest.mark.parametrize(
    ("samples", "streams"),
    [(1, 1), (511, 1), (512, 2), (1797, 6), (20_000, 64), (49_151, 96), (49_152, 192), (10**9, 192)],
)
def test_small_data_has_fewer_streams(samples: int, streams: int) -> None:
    order = Blocks([samples])
    assert order == Blocks([samples], streams)
    assert 192 % order.streams == 0


def test_memory_follows_the_data_and_not_the_options() -> None:
    """A window or a number of streams beyond the data is the same order, in no more memory."""
    sizes = [400, 100, 500]
    positions = np.arange(1000)
    for largest, of_data in (({"window": 2**31}, {}), ({"streams": 2**31}, {"streams": 1000})):
        tracemalloc.start()
        huge = Blocks(sizes, **{"streams": 1} | largest).epoch(1, 2, 1000)(positions)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**22
        if of_data:
            assert huge.tolist() == Blocks(sizes, **of_data).epoch(1, 2, 1000)(positions).tolist()
        assert sorted(huge.tolist()) == list(range(1000))
