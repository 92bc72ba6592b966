"""LengthBucketed: every sample once, little padding, never over the budget, one bucket at each step, in any world."""

import pickle
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import LengthBucketed, Plan
from headrace.types import TAILS, Tail, World
from plan.plan_cases import PROPERTY

LOGNORMAL = np.exp(np.random.default_rng(0).normal(5, 0.8, 20_000)).astype(np.int64) + 1


def plans(
    order: LengthBucketed, ranks: int, tail: Tail = "pad", seed: int = 3, per_rank: int | None = None
) -> list[Plan]:
    batches = per_rank or order.per_rank
    return [Plan(order, len(order.lengths), batches, World(rank, ranks), tail, seed) for rank in range(ranks)]


def steps(mine: list[Plan], epoch: int = 0, cursor: int = 0) -> list[list[list[int]]]:
    """The positions of all ranks at each step, shape (steps, ranks, batch)."""
    return [
        [plan.positions(epoch, step, cursor).tolist() if plan.size(epoch, step, cursor) else [] for plan in mine]
        for step in range(mine[0].most_steps(epoch, cursor))
    ]


def lengths_of(order: LengthBucketed, plan: Plan, positions: list[int], epoch: int = 0) -> list[float]:
    return order.lengths[plan.indices(epoch, np.array(positions, np.int64))].tolist()


ORDERS = st.builds(
    lambda lengths, tokens, cells, per_rank, spread: LengthBucketed(
        lengths,
        **({"max_tokens": max(lengths) * tokens} if tokens < 5 else {"batch_size": int(tokens)}),
        cells=cells,
        per_rank=per_rank if cells % per_rank == 0 else 1,
        spread=spread,
    ),
    st.lists(st.integers(1, 30), min_size=1, max_size=150),
    st.sampled_from([1, 1.5, 2, 4, 5, 7]),
    st.sampled_from([1, 2, 4, 6]),
    st.integers(1, 2),
    st.sampled_from([0.05, 0.5, 1.0]),
)


@PROPERTY
@given(ORDERS, st.integers(1, 5), st.sampled_from(TAILS), st.integers(0, 3))
def test_every_sample_comes_once_and_no_batch_exceeds_its_budget(
    order: LengthBucketed, ranks: int, tail: Tail, epoch: int
) -> None:
    mine = plans(order, ranks, tail)
    read = steps(mine, epoch)
    seen = Counter(position for step in read for batch in step for position in batch)
    samples, end = len(order.lengths), mine[0].end(epoch)
    assert sorted(seen) == list(range(end))
    assert set(seen.values()) <= {1}
    assert end <= samples + (ranks - 1 if tail == "pad" else 0)
    assert end >= samples or tail == "drop"
    assert len({plan.indices(epoch, np.arange(samples)).tobytes() for plan in mine}) == 1
    assert sorted(mine[0].indices(epoch, np.arange(samples)).tolist()) == list(range(samples))
    divides = order.cells % (ranks * order.per_rank) == 0
    for number, step in enumerate(read):
        sizes = [len(batch) for batch in step]
        assert max(sizes) - min(sizes) <= (tail == "exact" and number == len(read) - 1 if divides else 1)
        for batch in filter(None, step):
            longest = max(lengths_of(order, mine[0], batch, epoch))
            if order.max_tokens is None:
                assert len(batch) <= order.batch_size * order.per_rank
            else:
                assert len(batch) * longest <= order.max_tokens * order.per_rank
    if tail != "exact":
        assert all(all(step) for step in read), "every rank has a batch at every step"
    assert [plan.steps(epoch) for plan in mine] == [sum(bool(step[rank]) for step in read) for rank in range(ranks)]
    assert [plan.share(epoch) for plan in mine] == [sum(len(step[rank]) for step in read) for rank in range(ranks)]
    if divides:
        assert {mine[0].most_steps(another) for another in range(epoch, epoch + 3)} == {len(read)}


@PROPERTY
@given(ORDERS, st.integers(1, 5), st.sampled_from(TAILS), st.data())
def test_a_run_goes_on_at_any_step(order: LengthBucketed, ranks: int, tail: Tail, data: st.DataObject) -> None:
    mine = plans(order, ranks, tail)
    whole = steps(mine)
    done = data.draw(st.integers(0, len(whole)))
    cursor = mine[0].cursor_after(0, done - 1) if done else 0
    left = steps(mine, 0, cursor) if cursor < len(order.lengths) else []
    assert left == whole[done:]
    others = plans(order, data.draw(st.integers(1, 5)), "exact", per_rank=data.draw(st.integers(1, 3)))
    read = [position for step in steps(others, 0, cursor) for batch in step for position in batch]
    assert sorted(read) == list(range(cursor, len(order.lengths)))


@PROPERTY
@given(ORDERS, st.sampled_from([1, 2, 3, 6]), st.sampled_from(["pad", "exact"]))
def test_a_world_of_half_the_ranks_reads_the_same_global_batches(order: LengthBucketed, ranks: int, tail: Tail) -> None:
    def sets(world: int, per_rank: int) -> list[list[int]]:
        read = steps(plans(order, world, tail, per_rank=per_rank))
        return [sorted(one for batch in step for one in batch if one < len(order.lengths)) for step in read]

    assert sets(ranks, 2) == sets(2 * ranks, 1)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_all_ranks_are_in_one_bucket_at_each_step(ranks: int) -> None:
    """A bucket's lengths differ by the spread. Where lengths are rare one has the samples of a group, and is wider."""
    order = LengthBucketed(LOGNORMAL, max_tokens=4096)
    mine = plans(order, ranks)
    read = [[lengths_of(order, mine[0], batch) for batch in step] for step in steps(mine)]
    wide = [max(map(max, step)) > min(map(min, step)) * (1 + order.spread) for step in read]
    assert np.mean(wide) < 0.13
    assert all(len({*map(len, step)}) == 1 for step in read)
    filled = [max(map(max, step)) * len(step[0]) / order.max_tokens for step in read]
    assert max(filled) <= 1
    assert np.mean(filled) > 0.93


def padding(order: LengthBucketed, mine: list[Plan], epoch: int = 0) -> float:
    read = [lengths_of(order, mine[0], batch, epoch) for step in steps(mine, epoch) for batch in step]
    return 1 - sum(map(sum, read)) / sum(len(batch) * max(batch) for batch in read)


def test_little_is_padded() -> None:
    for options, most in (({"max_tokens": 4096}, 0.05), ({"batch_size": 16}, 0.07)):
        order = LengthBucketed(LOGNORMAL, **options)
        assert padding(order, plans(order, 8)) < most
    wider = LengthBucketed(LOGNORMAL, max_tokens=4096, spread=0.5)
    assert 0.1 < padding(wider, plans(wider, 8)) < 0.3


def test_other_samples_meet_in_each_epoch() -> None:
    order = LengthBucketed(LOGNORMAL, max_tokens=4096)
    (mine,) = plans(order, 1)

    def pairs(epoch: int) -> set[tuple[int, int]]:
        return {
            (min(pair), max(pair))
            for step in range(mine.steps(epoch))
            for pair in pairwise(mine.batch(epoch, step).tolist())
        }

    again, first = pairs(1), pairs(0)
    assert len(first & again) < 0.02 * len(first)
    assert pairs(0) == first
    longest = [int(order.lengths[mine.batch(0, step)].max()) for step in range(mine.steps(0))]
    correlation = np.corrcoef(longest[:-8], longest[8:])[0, 1]
    assert abs(correlation) < 0.15, "batches eight steps apart are of unrelated lengths"


def test_a_single_group_is_mixed_up_to_the_spread() -> None:
    order = LengthBucketed(np.arange(100, 132), batch_size=4, spread=0.2)
    (mine,) = plans(order, 1)
    epochs = [[frozenset(mine.batch(epoch, step).tolist()) for step in range(8)] for epoch in range(2)]
    assert len({*epochs[0], *epochs[1]}) > 12


def test_what_is_dropped_differs_by_epoch_and_has_any_length() -> None:
    few = LOGNORMAL[:2003]
    for options in ({"max_tokens": 4096}, {"batch_size": 32}):
        mine, *_ = plans(LengthBucketed(few, **options), 8, "drop")
        read: Counter[int] = Counter()
        for epoch in range(120):
            read.update(mine.indices(epoch, np.arange(mine.end(epoch))).tolist())
        assert len(read) == len(few)
        dropped = 120 - np.array([read[index] for index in range(len(few))])
        shortest, longest = np.argsort(few)[:1000], np.argsort(few)[1000:]
        assert 0.3 < dropped[shortest].sum() / dropped.sum() < 0.7
        assert dropped[longest].sum() > 0


def test_every_batch_is_full_but_the_last() -> None:
    order = LengthBucketed(LOGNORMAL, batch_size=16)
    for ranks, tail in ((1, "pad"), (8, "pad"), (8, "drop")):
        sizes = [[len(batch) for batch in step] for step in steps(plans(order, ranks, tail))]
        assert all(step == [16] * ranks for step in sizes[:-2])
        assert tail != "drop" or all(step == [16] * ranks for step in sizes)


def test_lengths_may_be_seconds() -> None:
    seconds = np.random.default_rng(1).uniform(0.3, 30, 3000)
    order = LengthBucketed(seconds, max_tokens=120.5)
    (mine,) = plans(order, 1)
    costs = [max(lengths) * len(lengths) for (batch,) in steps([mine]) if (lengths := lengths_of(order, mine, batch))]
    assert max(costs) <= 120.5
    assert np.mean(costs) > 0.8 * 120.5


def test_threads_that_share_a_plan_find_the_same_steps() -> None:
    order = LengthBucketed(LOGNORMAL, max_tokens=4096)
    (alone,), (shared,) = plans(order, 1), plans(pickle.loads(pickle.dumps(order)), 1)
    expected = [alone.positions(0, step).tolist() for step in range(alone.steps(0))]
    found: dict[int, list[int]] = {}
    numbers = iter(range(len(expected)))

    def read() -> None:
        for step in numbers:
            found[step] = shared.positions(0, step).tolist()

    threads = [Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[step] for step in range(len(expected))] == expected


def test_a_plan_is_sent_without_its_tables() -> None:
    order = LengthBucketed(LOGNORMAL, max_tokens=4096)
    (mine,) = plans(order, 1)
    before = len(pickle.dumps(mine))
    count = mine.steps(0)
    assert len(pickle.dumps(mine)) <= before + 100
    theirs = pickle.loads(pickle.dumps(mine))
    assert theirs == mine
    assert theirs.steps(0) == count
    assert theirs.batch(0, count - 1).tolist() == mine.batch(0, count - 1).tolist()


def test_how_many_batches_a_rank_takes_changes_no_order() -> None:
    one, two = LengthBucketed([3, 4], max_tokens=9), LengthBucketed([3, 4], max_tokens=9, per_rank=2)
    assert one == two
    assert one.described == two.described
    for other in (
        {"max_tokens": 8},
        {"batch_size": 9},
        {"max_tokens": 9, "cells": 4},
        {"max_tokens": 9, "spread": 0.1},
    ):
        assert one.described != LengthBucketed([3, 4], **other).described
    (plan,) = plans(one, 1)
    assert plan != replace(plan, batch_size=2)


def test_samples_that_exceed_the_budget_are_named_with_what_can_be_done() -> None:
    text = (
        r"lengths\[1\]=12 is not allowed: expected at most max_tokens=10\. 2 of 4 samples are longer than that, the "
        r"longest 50\. Raise max_tokens, cut these samples.*or leave them out"
    )
    with pytest.raises(ValueError, match=text):
        LengthBucketed([3, 12, 4, 50], max_tokens=10)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([5e-324, 1.0], {"max_tokens": 2.0}),
        ([1.0, 2.0], {"max_tokens": 1e300}),
        ([2**53, 2**53], {"max_tokens": 2.0**53}),
        ([1, 2, 3], {"batch_size": 2**62}),
        ([1, 1, 1, 1], {"max_tokens": 10**20, "spread": 1e-17}),
        ([7] * 100, {"max_tokens": 14}),
    ],
    ids=str,
)
def test_extreme_numbers_are_read_once_too(lengths: list[float], options: dict[str, Any]) -> None:
    for ranks in (1, 3):
        mine = plans(LengthBucketed(lengths, **options), ranks, "exact")
        read = [index for plan in mine for step in range(plan.steps(0)) for index in plan.batch(0, step).tolist()]
        assert sorted(read) == list(range(len(lengths)))


def test_whole_numbers_are_the_same_lengths_as_floats() -> None:
    assert LengthBucketed([3.0, 4.0], 1).described == LengthBucketed(np.array([3, 4], np.uint8), 1).described


def test_lengths_of_another_dataset_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"len\(lengths\)=2 is not allowed: expected one length per sample, len\(dataset\)=3"
    ):
        Plan(LengthBucketed([1, 2], batch_size=1), 3)


def test_numbers_are_frozen() -> None:
    """What a resumed run reads depends on them."""
    lengths = (np.arange(60) * 37 % 41 + 1).tolist()
    read = []
    for options in ({"max_tokens": 90}, {"batch_size": 4}):
        plan = Plan(LengthBucketed(lengths, **options, cells=2), 60, seed=5, world=World(0, 2))
        read.append([plan.batch(1, step).tolist() for step in range(plan.steps(1))])
    assert read == FROZEN


FROZEN = [
    [
        [31, 52],
        [42, 1],
        [46, 36, 57, 47],
        [45, 35, 56],
        [44, 34, 24],
        [53, 43],
        [49, 39, 19, 9, 30, 51, 0],
        [33, 13],
        [37, 17, 7, 38, 18],
    ],
    [
        [31, 52, 42, 1],
        [53, 43, 33, 13],
        [9, 30, 51, 0],
        [7, 49, 39, 19],
        [57, 47, 37, 17],
        [44, 34, 24, 45],
        [35, 56, 46, 36],
        [38, 18],
    ],
]
