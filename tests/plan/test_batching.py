"""The seam for batches of other sizes: one class, and plan, workers and resumes follow."""

import pickle
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace import Balanced, DataLoader, Order, Plan, Sequential, Shuffled, World
from headrace.plan.batching import Batching, EvenBatches
from headrace.progress import source
from headrace.types import TAILS, PlanTask, Tail
from headrace.worker.work import Work
from headrace.worker.worker import Worker
from plan.plan_cases import PROPERTY


class Growing(Batching):
    """Every rank has one sample at the first position of an epoch, and one more at each further global batch.

    Where a batch begins decides on its size, so that a run may begin at any batch. In odd epochs batches are twice as
    large.
    """

    def _bounds(self, epoch: int) -> list[tuple[int, int]]:
        unit, bounds, start = self.ranks * (1 + epoch % 2), [], 0
        while start < self.samples:
            bounds.append((start, start + unit * (len(bounds) + 1)))
            start = bounds[-1][1]
        start, stop = bounds[-1]
        if self.tail == "drop" and stop > self.samples:
            bounds.pop()
        elif self.tail == "pad":
            bounds[-1] = start, min(stop, start - (start - self.samples) // self.ranks * self.ranks)
        elif self.tail == "exact":
            bounds[-1] = start, min(stop, self.samples)
        return bounds

    def end(self, epoch: int, cursor: int) -> int:
        left = [stop for start, stop in self._bounds(epoch) if start >= cursor]
        return max(left, default=cursor)

    def steps(self, epoch: int, cursor: int) -> int:
        return sum(start >= cursor for start, _ in self._bounds(epoch))

    def bounds(self, epoch: int, step: int, cursor: int) -> tuple[int, int]:
        left = [bounds for bounds in self._bounds(epoch) if bounds[0] >= cursor]
        return left[step] if 0 <= step < len(left) else (self.samples, self.samples)


def plans(order: Order, length: int, ranks: int, tail: Tail) -> list[Plan]:
    return [Plan(order, length, 2, World(rank, ranks), tail, 3, batching=Growing) for rank in range(ranks)]


def read(plan: Plan, epoch: int, cursor: int) -> list[list[int]]:
    return [plan.positions(epoch, step, cursor).tolist() for step in range(plan.steps(epoch, cursor))]


@PROPERTY
@given(st.integers(1, 60), st.integers(1, 5), st.sampled_from(TAILS), st.integers(0, 3), st.data())
def test_every_rank_has_its_share_of_batches_that_grow(
    length: int, ranks: int, tail: Tail, epoch: int, data: st.DataObject
) -> None:
    mine = plans(Sequential(), length, ranks, tail)
    reached = [0]
    for step in range(mine[0].most_steps(epoch)):
        reached.append(mine[0].cursor_after(epoch, step))
        assert {plan.cursor_after(epoch, step) for plan in mine} == {reached[-1]}
    cursor = data.draw(st.sampled_from(reached))
    batches = [read(plan, epoch, cursor) for plan in mine]
    read_by_all = Counter(position for rank in batches for batch in rank for position in batch)
    assert sorted(read_by_all) == list(range(cursor, mine[0].end(epoch, cursor)))
    assert set(read_by_all.values()) <= {1}
    assert [plan.share(epoch, cursor) for plan in mine] == [sum(map(len, rank)) for rank in batches]
    assert [
        [plan.size(epoch, step, cursor) for step in range(len(rank))] for plan, rank in zip(mine, batches, strict=True)
    ] == [[len(batch) for batch in rank] for rank in batches]
    if tail != "exact":
        assert len({plan.share(epoch, cursor) for plan in mine}) == 1
    if tail == "exact":
        assert mine[0].end(epoch, cursor) == length


@PROPERTY
@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 2), st.sampled_from([Shuffled(), Sequential()]))
def test_workers_compute_them(length: int, ranks: int, epoch: int, order: Order) -> None:
    for plan in plans(order, length, ranks, "pad"):
        worker = Worker(Work(dataset=range(length), collate_fn=list, batched=True, plan=plan))
        batches = [worker.run_inline(PlanTask(epoch, step)) for step in range(plan.steps(epoch))]
        assert batches == [plan.batch(epoch, step).tolist() for step in range(plan.steps(epoch))]


EXECUTORS: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"num_workers": 2, "executor": "thread"},
    "processes": {"num_workers": 2},
}


@pytest.mark.parametrize("dataset", [range(23), torch.arange(23)], ids=["samples", "in memory"])
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("tail", TAILS)
def test_loaders_read_and_resume_them(tail: Tail, executor: str, dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a change to the loader: it is only given another batching."""
    monkeypatch.setattr(source, "Plan", partial(Plan, batching=Growing))

    def loader(rank: int) -> DataLoader[Any]:
        options = EXECUTORS[executor]
        return DataLoader(dataset, 2, shuffle=True, seed=3, tail=tail, distributed=World(rank, 2), **options)

    loaders, mine = [loader(rank) for rank in range(2)], plans(Shuffled(), 23, 2, tail)
    counted = [0, 0]
    for epoch in range(2):
        states: list[list[dict[str, Any]]] = []
        for rank in range(2):
            expected = [mine[rank].batch(epoch, step).tolist() for step in range(mine[rank].steps(epoch))]
            assert len(loaders[rank]) == len(expected)
            states.append([])
            batches = []
            for batch in loaders[rank]:
                batches.append(batch.tolist())
                states[rank].append(loaders[rank].state_dict())
            assert batches == expected
            counted[rank] += sum(map(len, expected))
            assert loaders[rank].stats().samples == counted[rank]
            for step, state in list(enumerate(states[rank][:-1]))[:: 1 if executor == "inline" else 3]:
                resumed = loader(rank)
                resumed.load_state_dict(state)
                assert [batch.tolist() for batch in resumed] == expected[step + 1 :]
        assert all(one == other for one, other in zip(*states, strict=False)), "the same on every rank"


@PROPERTY
@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 5), st.sampled_from(TAILS), st.booleans(), st.data())
def test_the_remainder_is_what_the_last_global_batch_has_besides_pads(
    length: int, ranks: int, batch_size: int, tail: Tail, grows: bool, data: st.DataObject
) -> None:
    batching = Growing if grows else EvenBatches
    mine = [
        Plan(Sequential(), length, batch_size, World(rank, ranks), tail, batching=batching) for rank in range(ranks)
    ]
    reached = [0, *(mine[0].cursor_after(1, step) for step in range(mine[0].most_steps(1)))]
    cursor = data.draw(st.sampled_from(reached) if grows else st.integers(0, length))
    steps = mine[0].most_steps(1, cursor)
    last = [plan.positions(1, steps - 1, cursor) for plan in mine if 0 < steps == plan.steps(1, cursor)]
    unpadded = sum(int((positions < length).sum()) for positions in last)
    whole = tail == "drop" or (not grows and unpadded == ranks * batch_size)
    assert {plan.remainder(1, cursor) for plan in mine} == {0 if whole else unpadded}


def test_a_run_goes_on_from_any_batch() -> None:
    plan = plans(Shuffled(), 40, 1, "exact")[0]
    whole = [plan.batch(2, step).tolist() for step in range(plan.steps(2))]
    assert [len(batch) for batch in whole] == [1, 2, 3, 4, 5, 6, 7, 8, 4]
    for done in range(1, len(whole) + 1):
        cursor = plan.cursor_after(2, done - 1)
        assert [plan.batch(2, step, cursor).tolist() for step in range(plan.steps(2, cursor))] == whole[done:]
    assert cursor == plan.samples


def test_lengths_take_the_epoch() -> None:
    plan = plans(Sequential(), 40, 2, "pad")[1]
    assert [plan.steps(epoch) for epoch in range(4)] == [6, 4, 6, 4]
    assert [plan.size(epoch, 1) for epoch in range(4)] == [2, 4, 2, 4]


def test_a_plan_is_told_from_another_by_its_batching() -> None:
    plan = plans(Balanced([0, 1] * 20), 40, 2, "pad")[0]
    assert plan != replace(plan, batching=EvenBatches)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert not plan.even
    assert Plan(Sequential(), 3).batching is EvenBatches
    assert Plan(Sequential(), 3).even


@pytest.mark.parametrize("tail", TAILS)
def test_even_batches_are_those_of_a_plan_without_a_batching(tail: Tail) -> None:
    plain = Plan(Shuffled(), 23, 3, World(1, 2), tail)
    assert plain == Plan(Shuffled(), 23, 3, World(1, 2), tail, batching=EvenBatches)
