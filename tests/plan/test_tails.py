"""The rules for the end of an epoch: every sample as often as the rule says, over any ranks, from any cursor."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Balanced, Plan, Sequential, Subset, Weighted
from headrace.types import TAILS
from plan.plan_cases import EVERY_KIND, PROPERTY, WORLDS, Case, cases, flat, read_by


@PROPERTY
@given(EVERY_KIND, WORLDS, st.data())
def test_exact_reads_each_position_once(case: Case, world: tuple[int, int], data: st.DataObject) -> None:
    plans = case.plans(*world, tail="exact")
    samples = plans[0].samples
    cursor = data.draw(st.integers(0, samples))
    read = read_by(plans, case.epoch, cursor)
    assert sorted(flat(read)) == list(range(cursor, samples))
    if not isinstance(case.order, Balanced):
        assert all(position % world[0] == rank for rank in range(world[0]) for position in flat(read[rank : rank + 1]))
    shares = [sum(map(len, rank)) for rank in read]
    assert max(shares) - min(shares) <= 1
    assert shares == [plan.share(0, cursor) for plan in plans]
    steps = [len(rank) for rank in read]
    assert max(steps) - min(steps) <= 1
    assert all(len(batch) == world[1] for rank in read for batch in rank[:-1])
    assert all(0 < len(rank[-1]) <= world[1] for rank in read if rank)


@PROPERTY
@given(EVERY_KIND, WORLDS, st.data())
def test_pad_gives_every_rank_the_same_steps(case: Case, world: tuple[int, int], data: st.DataObject) -> None:
    plans = case.plans(*world, tail="pad")
    samples = plans[0].samples
    cursor = data.draw(st.integers(0, samples))
    read = read_by(plans, case.epoch, cursor)
    pads = -(samples - cursor) % world[0]
    assert sorted(flat(read)) == list(range(cursor, samples + pads)), "each once, and just the pads beyond"
    assert len({tuple(map(len, rank)) for rank in read}) == 1, "equal sizes at each step"
    assert all(len(batch) == world[1] for rank in read for batch in rank[:-1])
    assert {plan.share(0, cursor) for plan in plans} == {-(-(samples - cursor) // world[0])}
    assert {plan.end(0, cursor) for plan in plans} == {samples + pads}
    if not isinstance(case.order, Weighted | Balanced):
        wrapped = (case.whole() * (pads // samples + 1))[:pads]
        assert case.at(range(samples, samples + pads)) == wrapped


@PROPERTY
@given(EVERY_KIND, WORLDS, st.data())
def test_drop_reads_whole_global_batches_only(case: Case, world: tuple[int, int], data: st.DataObject) -> None:
    plans = case.plans(*world, tail="drop")
    cursor = data.draw(st.integers(0, plans[0].samples))
    read = read_by(plans, case.epoch, cursor)
    steps = (plans[0].samples - cursor) // (world[0] * world[1])
    assert {len(rank) for rank in read} == {steps}
    assert all(len(batch) == world[1] for rank in read for batch in rank)
    assert sorted(flat(read)) == list(range(cursor, cursor + steps * world[0] * world[1]))


@PROPERTY
@given(cases(), WORLDS, st.sampled_from(TAILS))
def test_every_sample_is_read(case: Case, world: tuple[int, int], tail: Any) -> None:
    """What the positions promise holds for the dataset's samples."""
    plans = case.plans(*world, tail=tail)
    read = Counter(
        index for plan in plans for step in range(plan.steps(0)) for index in plan.batch(case.epoch, step).tolist()
    )
    expected = set(case.order.indices.tolist()) if isinstance(case.order, Subset) else set(range(case.length))
    if tail == "exact":
        assert read == Counter(expected)
    elif tail == "pad":
        assert set(read) == expected
        assert read.total() == len(expected) + -len(expected) % world[0]
    else:
        assert set(read) <= expected
        assert set(read.values()) <= {1}


@PROPERTY
@given(EVERY_KIND, WORLDS, st.sampled_from(TAILS), st.booleans(), st.data())
def test_a_step_has_as_many_samples_as_it_says(
    case: Case, world: tuple[int, int], tail: Any, in_runs: bool, data: st.DataObject
) -> None:
    plans = case.plans(*world, tail=tail, in_runs=in_runs)
    cursor = data.draw(st.integers(0, plans[0].samples))
    sizes = [[plan.size(case.epoch, step, cursor) for step in range(plan.steps(case.epoch, cursor))] for plan in plans]
    assert sizes == [[*map(len, rank)] for rank in read_by(plans, case.epoch, cursor)]


@pytest.mark.parametrize(
    ("length", "size", "tail", "batches"),
    [
        (11, 4, "pad", [[[0, 4], [8]], [[1, 5], [9]], [[2, 6], [10]], [[3, 7], [11]]]),
        (11, 4, "drop", [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]]),
        (11, 4, "exact", [[[0, 4], [8]], [[1, 5], [9]], [[2, 6], [10]], [[3, 7]]]),
        (3, 5, "pad", [[[0]], [[1]], [[2]], [[3]], [[4]]]),
        (3, 5, "drop", [[], [], [], [], []]),
        (3, 5, "exact", [[[0]], [[1]], [[2]], [], []]),
    ],
)
def test_the_documented_shares(length: int, size: int, tail: Any, batches: list[list[list[int]]]) -> None:
    """With a batch size of 2; and every row of the table stands in the docstring."""
    plans = Case(Sequential(), length, 0, 0).plans(size, 2, tail=tail)
    assert read_by(plans, 0) == batches
    assert [plan.steps(0) for plan in plans] == [len(rank) for rank in batches]
    assert [[plan.batch(0, step).tolist() for step in range(plan.steps(0))] for plan in plans] == [
        [[position % length for position in batch] for batch in rank] for rank in batches
    ]
    if length == 11:
        cells = " | ".join(" ".join(map(str, rank)) for rank in batches)
        assert f'| `"{tail}"` | {cells} |' in (Plan.__doc__ or "")
