"""Global batches dealt in runs, and several steps evaluated together."""

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Balanced, Sequential
from headrace.types import TAILS
from plan.plan_cases import EVERY_KIND, PROPERTY, WORLDS, Case, cases, read_by


@pytest.mark.parametrize("kinds", ["sequential shuffled subset shuffled-subset weighted", "balanced"])
@PROPERTY
@given(data=st.data(), world=WORLDS, tail=st.sampled_from(TAILS))
def test_runs_are_another_dealing_of_the_same_global_batches(
    kinds: str, world: tuple[int, int], tail: Any, data: st.DataObject
) -> None:
    """The ranks' batches laid end to end are the epoch's order, with the pads at the end."""
    case = data.draw(cases(kinds))
    cursor = data.draw(st.integers(0, case.order.samples(case.length)))
    plans = case.plans(*world, tail=tail, in_runs=True)
    in_turn, in_runs = (
        read_by([replace(plan, in_runs=runs) for plan in plans], case.epoch, cursor) for runs in (False, True)
    )
    assert [sum(map(len, rank)) for rank in in_runs] == [plan.share(0, cursor) for plan in plans]
    end, stop = plans[0].end(0, cursor), cursor
    assert {plan.end(0, cursor) for plan in plans} == {end}
    for step in range(max(map(len, in_turn))):
        gathered, others = ([rank[step] for rank in read if step < len(rank)] for read in (in_runs, in_turn))
        start, stop = stop, min(stop + world[0] * world[1], end)
        assert sorted(chain(*gathered)) == sorted(chain(*others)) == list(range(start, stop))
        if not isinstance(case.order, Balanced) or stop > case.order.samples(case.length):
            assert list(chain(*gathered)) == list(range(start, stop))
            sizes = [len(rank[step]) if step < len(rank) else 0 for rank in in_runs]
            assert sizes == sorted(sizes, reverse=True), "the first ranks have one more"
            assert sizes[0] - sizes[-1] <= 1
        else:
            assert gathered == others, "it keeps a deal of its own"
    assert stop == end


def test_runs_literally() -> None:
    plans = Case(Sequential(), 9, 0, 0).plans(4, 4, in_runs=True)
    assert read_by(plans, 0) == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]], [[9, 10, 11]]]
    assert read_by([replace(plan, in_runs=False) for plan in plans], 0)[0] == [[0, 4, 8]]
    plans = Case(Sequential(), 11, 0, 0).plans(2, 4, in_runs=True)
    assert read_by(plans, 0) == [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], [10, 11]]]
    plans = Case(Sequential(), 11, 0, 0).plans(2, 4, in_runs=True, tail="exact")
    assert read_by(plans, 0) == [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], [10]]]


@PROPERTY
@given(EVERY_KIND, WORLDS, st.sampled_from(TAILS), st.booleans(), st.data())
def test_a_span_is_its_steps(case: Case, world: tuple[int, int], tail: Any, in_runs: bool, data: st.DataObject) -> None:
    plans = case.plans(*world, tail=tail, in_runs=in_runs)
    cursor = data.draw(st.integers(0, plans[0].samples))
    most = data.draw(st.integers(1, 9))
    for plan, steps in zip(plans, read_by(plans, case.epoch, cursor), strict=True):
        for step in range(len(steps)):
            positions, indices = plan.span(case.epoch, step, cursor, most)
            few = 1 if isinstance(case.order, Balanced) else most
            assert positions.tolist() == [*chain(*steps[step : step + few])]
            assert indices.tolist() == plan.indices(case.epoch, positions).tolist()
