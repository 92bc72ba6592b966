"""Samples fetched several at a time: the same batches, sooner."""

import random
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, Subset

import headrace
from headrace import DataLoader
from headrace.testing import FakeDataset

LIMIT_S = 20
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
