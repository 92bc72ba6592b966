"""A loader whose order cuts the batches: its length, its states, its workers, and what the ranks agree on."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from headrace import DataLoader, LengthBucketed, StateMismatch, World
from headrace.testing import FakeDataset
from launch import run_ranks

LENGTHS = np.random.default_rng(0).lognormal(3, 0.7, 300).astype(int) + 1
JOB = Path(__file__).parent / "bucketed_job.py"


class Texts(Dataset[tuple[int, torch.Tensor]]):
    """Texts of these lengths, with noise."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(int(LENGTHS[index]))


def pad(samples: Sequence[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    indices, texts = zip(*samples, strict=True)
    return torch.tensor(indices), torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)


def loader(**options: Any) -> DataLoader[Any]:
    own = {name: options.pop(name) for name in ("max_tokens", "per_rank") if name in options}
    order = LengthBucketed(LENGTHS, **{"max_tokens": 400, **own})
    return DataLoader(Texts(), order=order, collate_fn=pad, seed=5, **options)


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(left, right) for pair in zip(one, other, strict=True) for left, right in zip(*pair, strict=True)
    )


WORKERS = [
    {},
    {"num_workers": 2, "executor": "thread"},
    {"num_workers": 2, "multiprocessing_context": "fork"},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 1, "multiprocessing_context": "spawn"},
    {"num_workers": 2, "in_order": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_workers_make_the_same_batches_in_every_epoch(options: dict[str, Any]) -> None:
    mine, reference = loader(**options), loader()
    for epoch in range(3):
        assert mine.epoch == epoch
        batches, expected = list(mine), list(reference)
        if options.get("in_order") is False:
            batches.sort(key=lambda batch: batch[0].tolist())
            expected.sort(key=lambda batch: batch[0].tolist())
        assert same(batches, expected)
        assert all(texts.numel() <= 400 for _, texts in batches)
        assert sorted(torch.cat([indices for indices, _ in batches]).tolist()) == list(range(300))
    assert mine.stats().samples == 900


def test_every_epoch_has_as_many_steps() -> None:
    mine = loader()
    count = len(mine)
    for epoch in range(4):
        assert len(mine) == count
        assert sum(step == len(mine) - 1 for step, _ in enumerate(mine)) == 1
        assert mine.epoch == epoch + 1


@pytest.mark.filterwarnings("ignore:the order's cells")
def test_where_ranks_do_not_divide_the_cells_the_length_is_that_of_the_epoch_that_comes_next() -> None:
    ranks = [loader(distributed=World(rank, 3)) for rank in range(3)]
    for _ in range(3):
        counts = [len(mine) for mine in ranks]
        assert [len(list(mine)) for mine in ranks] == counts


def test_asking_for_lengths_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    mine = DataLoader(Texts(), order=LengthBucketed(LENGTHS, max_tokens=400), collate_fn=pad)
    assert len(mine) == len(mine.batch_sampler)
    mine.verify()
    assert torch.equal(torch.get_rng_state(), before)


def test_frameworks_that_read_the_batch_sampler_see_the_plan() -> None:
    mine = loader()
    plan = mine.plan()
    expected = [plan.batch(0, step).tolist() for step in range(plan.steps(0))]
    assert list(mine.batch_sampler) == expected
    assert isinstance(mine.batch_sampler, torch.utils.data.BatchSampler)
    again = DataLoader(Texts(), batch_sampler=mine.batch_sampler, order=mine.order, collate_fn=pad)
    assert [indices.tolist() for indices, _ in again] == expected
    made = type(mine.batch_sampler)(mine.sampler, batch_size=1, drop_last=False)  # as Lightning makes one
    assert list(made) == expected
    assert list(type(made)(range(3), batch_size=1, drop_last=False)) == [[0], [1], [2]]
    mine.batch_sampler.set_epoch(1)
    assert mine.epoch == 1


def test_it_is_the_same_length_before_and_after_a_seed_is_drawn() -> None:
    torch.manual_seed(2)
    mine = DataLoader(Texts(), order=LengthBucketed(LENGTHS, max_tokens=400), collate_fn=pad)
    count = len(mine)
    assert len(list(mine)) == count


@pytest.mark.parametrize("workers", [0, 2])
def test_it_goes_on_at_any_step(workers: int) -> None:
    whole = [*loader(), *(second := loader(), second.set_epoch(1), list(second))[2]]
    mine = loader(num_workers=workers, persistent_workers=workers > 0)
    read, states = [], [mine.state_dict()]
    for _ in range(2):
        for batch in mine:
            read.append(batch)
            states.append(mine.state_dict())
    assert same(read, whole)
    for done in (0, 1, len(whole) // 3, len(loader()) - 1, len(loader()), len(whole) - 2):
        other = loader(num_workers=workers)
        other.load_state_dict(states[done])
        epoch = other.epoch
        rest = list(other)
        if epoch == 0:
            rest += list(other)
        assert same(rest, whole[done:])
        assert other.state_dict() == states[-1]


def test_it_goes_on_in_a_world_of_half_the_ranks_with_the_same_global_batches() -> None:
    ranks = [iter(loader(distributed=World(rank, 4))) for rank in range(4)]
    steps = [[next(rank) for rank in ranks] for _ in range(3)]
    del ranks
    first = loader(distributed=World(0, 4))
    reading = iter(first)
    for _ in range(3):
        next(reading)
    state = first.state_dict()
    halves = [loader(distributed=World(rank, 2), per_rank=2) for rank in range(2)]
    fours = [loader(distributed=World(rank, 4)) for rank in range(4)]
    for one in halves + fours:
        one.load_state_dict(state)
    left = [
        [set(torch.cat([b[0] for b in step]).tolist()) for step in zip(*group, strict=True)]
        for group in (halves, fours)
    ]
    assert left[0] == left[1]
    read = [index for step in steps for indices, _ in step for index in indices.tolist()]
    read += [index for step in left[0] for index in step]
    assert sorted(read) == list(range(300))


def test_a_state_of_another_budget_is_refused() -> None:
    other = loader(max_tokens=500)
    with pytest.raises(StateMismatch, match=r"order=.*LengthBucketed"):
        other.load_state_dict(loader().state_dict())


def test_it_says_how_an_abandoned_epoch_ended() -> None:
    mine = loader()
    count = len(mine)
    for _ in mine:
        break
    with pytest.warns(UserWarning, match=rf"1 of {count} batches"):
        next(iter(mine))


@pytest.mark.parametrize(("ranks", "per_rank", "told"), [(1, 1, 0), (4, 2, 0), (3, 1, 3), (16, 1, 16), (2, 8, 16)])
def test_a_world_that_does_not_divide_the_cells_is_told_of_once(ranks: int, per_rank: int, told: int) -> None:
    mine = loader(distributed=World(0, ranks), per_rank=per_rank, max_tokens=180)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            list(mine)
    assert [f"is no multiple of {told}" in str(one.message) for one in caught] == [True] * bool(told)
    assert all(one.filename == __file__ for one in caught)


@pytest.mark.parametrize("size", [32, None])
def test_a_batch_size_beside_it_is_refused(size: int | None) -> None:
    with pytest.raises(
        ValueError, match=rf"batch_size={size} is not allowed: expected 1, the default, with order=LengthB"
    ):
        DataLoader(Texts(), batch_size=size, order=LengthBucketed(LENGTHS, max_tokens=400))


def test_a_dataset_may_bring_it() -> None:
    class Bringing(FakeDataset):
        order = LengthBucketed([3] * 20, batch_size=4)

    assert [len(batch) for batch in DataLoader(Bringing(20), shuffle=True, seed=0, collate_fn=list)] == [4] * 5


def test_drop_that_leaves_nothing_is_told_of() -> None:
    few = DataLoader([1, 2], order=LengthBucketed([1, 1], batch_size=4), drop_last=True, seed=0)
    with pytest.warns(
        UserWarning, match="drop_last=True leaves no batch at all: 2 samples are fewer than one global batch"
    ):
        assert list(few) == []


def test_broken_samples_are_replaced_within_the_budget() -> None:
    class Broken(Texts):
        def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
            if index % 9 == 7:
                raise ValueError("broken")
            return super().__getitem__(index)

    order = LengthBucketed(LENGTHS, max_tokens=400)
    mine = DataLoader(Broken(), order=order, collate_fn=pad, seed=5, on_error="replace")
    batches = list(mine)
    assert all(texts.numel() <= 400 for _, texts in batches)
    read = torch.cat([indices for indices, _ in batches])
    assert len(read) == 300
    assert not (read % 9 == 7).any()
    assert mine.stats().replaced == 33


@pytest.mark.slow
def test_ranks_take_equal_steps_and_verify_finds_other_budgets(tmp_path: Path) -> None:
    reports = run_ranks(JOB, 2, tmp_path)
    assert {report["steps"] for report in reports} == {reports[0]["len"]}
    assert sorted(reports[0]["indices"] + reports[1]["indices"]) == list(range(300))
    assert all("order" in report["refused"] for report in reports), json.dumps(reports)
    assert all("batch_size" in report["refused_per_rank"] for report in reports)
