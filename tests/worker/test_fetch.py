"""Samples fetched several at a time: the same batches, sooner."""

import random
import threading
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, Subset

import headrace
from headrace import DataLoader, Plan, Sequential, Shuffled, Weighted, World
from headrace.plan.plan import SUBSTITUTES
from headrace.testing import FakeDataset

LIMIT_S = 60
EVERYWHERE = [
    pytest.param({"num_workers": 0}, id="inline"),
    pytest.param({"num_workers": 1}, id="process"),
    pytest.param({"num_workers": 2, "executor": "thread"}, id="thread"),
]


class Meeting(Dataset[int]):
    """Samples that wait for each other, four at a time."""

    def __init__(self) -> None:
        self.barrier: threading.Barrier | None = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        MEETING.wait(LIMIT_S)
        return index


MEETING = threading.Barrier(4)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_the_samples_of_a_batch_are_fetched_together(where: dict[str, Any]) -> None:
    """They would wait in vain otherwise."""
    if "executor" in where:  # two batches at once would fill the barrier with strangers
        where = where | {"num_workers": 1}
    loader = DataLoader(Meeting(), batch_size=4, fetch_threads=4, seed=0, **where)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Sometimes(Dataset[dict[str, Any]]):
    """Draws from the global generators, but only in some samples."""

    def __init__(self, rare: int) -> None:
        self.rare = rare

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = random.random() if index % self.rare == self.rare - 1 else 0.0
        return {"index": index, "drawn": drawn, "own": headrace.rng().random()}


def flat(batches: Any) -> list[Any]:
    return [{key: value.tolist() for key, value in batch.items()} for batch in batches]


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("rare", [1, 7, 24])
def test_draws_from_global_generators_are_noticed_and_the_bits_kept(where: dict[str, Any], rare: int) -> None:
    dataset = Sometimes(rare)
    expected = flat(DataLoader(dataset, batch_size=4, seed=5))
    with pytest.warns(UserWarning, match=r"draws from the global generator of random, .*headrace\.rng") as said:
        batches = flat(DataLoader(dataset, batch_size=4, seed=5, fetch_threads=4, **where))
    assert batches == expected
    assert sum("global generator" in str(one.message) for one in said) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
def test_parity_holds_draw_by_draw(workers: int, shuffle: bool) -> None:
    results = []
    for loader, more in ((TorchLoader, {}), (DataLoader, {"fetch_threads": 3})):
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        results.append(flat(loader(FakeDataset(20), batch_size=6, shuffle=shuffle, num_workers=workers, **more)))  # type: ignore[operator]
        results.append([torch.rand(()).item(), random.random(), np.random.rand()])
    assert results[:2] == results[2:]


class Broken(Dataset[int]):
    """Raises at two of its samples; the later one first."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raised.wait(LIMIT_S)
        if index == 3:
            raised.set()
        if index in (2, 3):
            raise KeyError(index)
        return index


raised = threading.Event()


@pytest.mark.parametrize("where", EVERYWHERE)
def test_the_first_error_in_order_is_raised(where: dict[str, Any]) -> None:
    loader = iter(DataLoader(Broken(), batch_size=4, fetch_threads=4, seed=0, **where))
    with pytest.raises(KeyError) as error:
        next(loader)
    assert "while fetching sample 2, position 2 of epoch 0, step 0" in "".join(error.value.__notes__)
    assert next(loader).tolist() == [4, 5, 6, 7]
    assert [one.name for one in threading.enumerate() if "fetch" in one.name] or where != {"num_workers": 0}


class Bulk(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [10 * index for index in indices]


@pytest.mark.parametrize("dataset", [Bulk(), Subset(Bulk(), range(8))])
def test_a_dataset_that_fetches_in_bulk_is_asked_once(dataset: Any) -> None:
    loader = DataLoader(dataset, batch_size=4, fetch_threads=4)
    assert [batch.tolist() for batch in loader] == [[0, 10, 20, 30], [40, 50, 60, 70]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "error", "says"),
    [
        (FakeDataset(3), {"fetch_threads": 0}, ValueError, "fetch_threads=0 is not allowed"),
        (FakeDataset(3), {"fetch_threads": 1.5}, TypeError, "fetch_threads"),
        (FakeDataset(3), {"fetch_threads": 2, "batch_size": None}, ValueError, "lists of indices"),
        (Stream(), {"fetch_threads": 2}, ValueError, "lists of indices"),
    ],
)
def test_wrong_numbers(dataset: Any, options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        DataLoader(dataset, **options)


def test_an_own_generator_needs_no_second_try() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = Sometimes(100)
        expected = flat(DataLoader(dataset, batch_size=4, seed=5))
        assert flat(DataLoader(dataset, batch_size=4, seed=5, fetch_threads=4)) == expected


class Cracked(FakeDataset):
    """Draws from every generator, and then raises at some of its samples."""

    def __init__(self, length: int, broken: Iterable[int] = (), kind: type[BaseException] = ValueError) -> None:
        super().__init__(length)
        self.broken = dict.fromkeys(broken, kind)
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked.append(index)
        own = headrace.rng().random()
        sample = super().__getitem__(index)
        if index in self.broken:
            raise self.broken[index](f"sample {index}\nis broken")
        return sample | {"own": own}


def singles(dataset: Any, **options: Any) -> list[dict[str, Any]]:
    """An epoch's samples, in order."""
    return [sample for batch in DataLoader(dataset, collate_fn=list, seed=3, **options) for sample in batch]


@pytest.mark.parametrize("where", [*EVERYWHERE, pytest.param({"num_workers": 2, "fetch_threads": 3}, id="fetch")])
@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
def test_a_broken_sample_is_replaced_and_the_position_keeps_its_numbers(where: dict[str, Any]) -> None:
    broken = {2, 11, 12, 17}
    plan = Plan(Shuffled(), 20, seed=3)
    expected = singles(Cracked(20), shuffle=True)
    records = []
    for position, sample in enumerate(expected):
        if (index := sample["index"]) in broken:
            sample["index"] = next(other for other in plan.substitutes(0, position) if other not in broken)
            error = f"ValueError: sample {index} is broken"
            records.append(headrace.Replaced(0, position // 4, position, index, sample["index"], error))
    loader = DataLoader(Cracked(20, broken), 4, shuffle=True, seed=3, collate_fn=list, on_error="replace", **where)
    assert [sample for batch in loader for sample in batch] == expected
    assert loader.stats().replacements == tuple(records)
    assert loader.stats().replaced == len(records) == 4


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data(), st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.sampled_from(["pad", "exact", "drop"]))
@pytest.mark.filterwarnings('ignore:tail="drop" leaves no batch')
def test_ranks_stay_equal_and_substitutes_do_not_depend_on_the_world(
    data: st.DataObject, length: int, size: int, batch_size: int, tail: Any
) -> None:
    broken = data.draw(st.sets(st.integers(0, length - 1), max_size=min(length // 2, 8)))
    shuffle = data.draw(st.booleans())

    def read(dataset: Any, world: World, on_error: Any) -> list[list[Any]]:
        options = {"seed": 3, "tail": tail, "collate_fn": list, "shuffle": shuffle, "on_error": on_error}
        return list(DataLoader(dataset, batch_size, distributed=world, **options))

    alone = singles(Cracked(length, broken), shuffle=shuffle, on_error="replace")
    whole = singles(Cracked(length), shuffle=shuffle)
    for one, other in zip(alone, whole, strict=True):
        assert one["index"] not in broken
        assert one == other | {"index": one["index"]}
        assert one == other or other["index"] in broken
    for rank in range(size):
        world = World(rank, size)
        batches = read(Cracked(length, broken), world, "replace")
        assert [len(batch) for batch in batches] == [len(batch) for batch in read(Cracked(length), world, "raise")]
        plan = Plan(Shuffled() if shuffle else Sequential(), length, batch_size, world, tail, 3)
        for step, batch in enumerate(batches):
            for position, sample in zip(plan.positions(0, step).tolist(), batch, strict=True):
                assert sample["index"] not in broken
                if position < length:
                    assert sample == alone[position]


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
def test_where_all_substitutes_fail_the_first_error_is_raised(where: dict[str, Any]) -> None:
    dataset = Cracked(20, range(1, 20), KeyError)
    reader = iter(DataLoader(dataset, 2, seed=3, on_error="replace", collate_fn=list, **where))
    substitutes = Plan(Sequential(), 20, seed=3).substitutes(0, 1)
    assert len(substitutes) == SUBSTITUTES
    assert 0 not in substitutes
    with pytest.raises(KeyError, match="sample 1") as caught:
        next(reader)
    assert caught.value.__notes__[:2] == [
        "headrace: while fetching sample 1, position 1 of epoch 0, step 0",
        f"headrace: 8 substitutes failed too: samples {substitutes}",
    ]
    if where == {"num_workers": 0}:
        assert dataset.asked == [0, 1, *substitutes]


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("options", [{}, {"fetch_threads": 2}])
@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
def test_what_is_no_fault_of_the_sample_is_raised(kind: type[BaseException], options: dict[str, Any]) -> None:
    for broken in ({1}, {1, *Plan(Sequential(), 20, seed=3).substitutes(0, 1)}):
        dataset = Cracked(20, broken, kind)
        if len(broken) > 1:  # the sample can be replaced; its substitute cannot
            dataset.broken[1] = ValueError
        reader = iter(DataLoader(dataset, 2, seed=3, on_error="replace", **options))
        with pytest.raises(kind) as caught:
            next(reader)
        if kind is MemoryError:
            substitute = "as a substitute" if len(broken) > 1 else "position 1 of"
            assert substitute in caught.value.__notes__[0]


def test_a_substitute_is_read_from_the_same_order() -> None:
    chosen = range(0, 40, 4)
    samples = singles(Cracked(40, {8, 20}), order=headrace.Subset(chosen), on_error="replace")
    assert {one["index"] for one in samples} == set(chosen) - {8, 20}
    heavy = Weighted([91.0] + [1.0] * 9, num_samples=1000)
    samples = singles(Cracked(10, {0}), order=heavy, on_error="replace")
    assert {one["index"] for one in samples} == set(range(1, 10)), "not the broken one eight times"


class CrackedBulk(Cracked):
    """Fetches in bulk."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        own = headrace.rng().random()
        samples = [FakeDataset.__getitem__(self, index) | {"own": own} for index in indices]
        if self.broken.keys() & indices:
            raise ValueError(f"one of {indices} is broken")
        return samples


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
def test_a_batch_that_cannot_be_had_in_bulk_is_fetched_one_by_one(where: dict[str, Any]) -> None:
    loader = DataLoader(CrackedBulk(12, {5}), 4, seed=3, collate_fn=list, on_error="replace", **where)
    in_bulk = list(DataLoader(CrackedBulk(12), 4, seed=3, collate_fn=list))
    one_by_one = list(DataLoader(Cracked(12, {5}), 4, seed=3, collate_fn=list, on_error="replace"))
    assert list(loader) == [in_bulk[0], one_by_one[1], in_bulk[2]]
    assert [(one.index, one.position) for one in loader.stats().replacements] == [(5, 5)]


@pytest.mark.parametrize("dataset", [Bulk(), Subset(Bulk(), range(8))])
def test_where_there_are_no_single_samples_a_bulk_error_is_raised(
    dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, indices: list[int]) -> list[int]:
        raise OSError("no such shard")

    monkeypatch.setattr(Bulk, "__getitems__", fail)
    with pytest.raises(OSError, match="no such shard") as caught:
        next(iter(DataLoader(dataset, 4, seed=0, on_error="replace")))
    assert caught.value.__notes__ == ["headrace: while fetching samples [0, 1, 2, 3], position 0 of epoch 0, step 0"]


class LateError(Dataset[int]):
    """Sample 0 fails for want of memory, but only after sample 1 has been replaced."""

    def __init__(self) -> None:
        self.replaced = threading.Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 0:
            self.replaced.wait(LIMIT_S)
            raise MemoryError
        if index == 1:
            raise ValueError(index)
        self.replaced.set()
        return index


def test_nothing_is_said_of_samples_behind_an_error() -> None:
    """One at a time, they would not have been fetched."""
    loader = DataLoader(LateError(), 2, seed=0, fetch_threads=2, on_error="replace")
    with pytest.raises(MemoryError):
        next(iter(loader))
    assert loader.stats().replaced == 0
