"""Which samples are in the batch that came last."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from headrace import DataLoader, Plan, ShardWriter, Shuffled, TarDataset, World
from headrace.testing import FakeDataset


class Broken(FakeDataset):
    """Sample 5 cannot be read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise ValueError("broken")
        return super().__getitem__(index)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "seed": 3},
        {"shuffle": True, "seed": 3, "num_workers": 2},
        {"shuffle": True, "num_workers": 2},
        {"shuffle": True, "seed": 3, "num_workers": 2, "in_order": False},
        {"sampler": [4, 2, 9, 1]},
        {"batch_size": 1, "batch_sampler": [[4, 2], [9], [1, 3, 5]], "num_workers": 1},
        {"batch_size": None},
        {"seed": 0, "distributed": World(1, 3), "tail": "pad"},
        {"device": "cpu", "num_workers": 2, "seed": 0},
    ],
    ids=str,
)
def test_the_indices_are_the_batchs(options: dict[str, Any]) -> None:
    loader = DataLoader(FakeDataset(10), **({"batch_size": 3} | options))
    assert loader.last_indices is None
    for batch in loader:
        found = loader.last_indices
        assert found is not None
        assert found.dtype == np.int64
        assert found.tolist() == np.atleast_1d(batch["index"]).tolist()


class Refilled:
    """Yields one list, filled anew for each batch."""

    def __iter__(self) -> Any:
        batch: list[int] = []
        for first in range(0, 10, 2):
            batch[:] = [first, first + 1]
            yield batch

    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_may_fill_its_list_anew(workers: int) -> None:
    loader = DataLoader(FakeDataset(10), batch_sampler=Refilled(), num_workers=workers)
    for batch in loader:
        assert loader.last_indices is not None
        assert loader.last_indices.tolist() == batch["index"].tolist()


class HalfBroken(FakeDataset):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 2:
            raise ValueError("broken")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_many_substitutes_in_a_batch(workers: int) -> None:
    loader = DataLoader(HalfBroken(600), 300, seed=0, on_error="replace", num_workers=workers)
    for batch in loader:
        assert loader.last_indices is not None
        assert loader.last_indices.tolist() == batch["index"].tolist()
    assert loader.stats().replaced == 300


def test_in_memory_rows_have_them_too() -> None:
    loader = DataLoader(TensorDataset(torch.arange(10)), 3, shuffle=True)
    for (batch,) in loader:
        assert loader.last_indices is not None
        assert loader.last_indices.tolist() == batch.tolist()


def test_after_a_resume() -> None:
    loader = DataLoader(FakeDataset(10), 3, shuffle=True, seed=0)
    next(iter(loader))
    again = DataLoader(FakeDataset(10), 2, shuffle=True, seed=0)
    again.load_state_dict(loader.state_dict())
    assert again.last_indices is None
    batch = next(iter(again))
    assert again.last_indices is not None
    assert again.last_indices.tolist() == batch["index"].tolist()
    assert again.last_indices.tolist() == Plan(Shuffled(), 10, 2, seed=0).batch(0, 0, 3).tolist()


def test_a_substitute_takes_the_place_of_a_broken_sample() -> None:
    loader = DataLoader(Broken(10), 4, seed=0, on_error="replace")
    for batch in loader:
        assert loader.last_indices is not None
        assert loader.last_indices.tolist() == batch["index"].tolist()
    assert loader.stats().replaced == 1


@pytest.mark.parametrize("dataset", [Numbers(), ["text"]])
def test_where_there_are_none(dataset: Any) -> None:
    options: dict[str, Any] = {} if isinstance(dataset, Numbers) else {"sampler": ["0"], "collate_fn": str}

    class Named(list[str]):
        def __getitem__(self, at: Any) -> str:
            return super().__getitem__(int(at))

    loader = DataLoader(dataset if isinstance(dataset, Numbers) else Named(dataset), **options)
    next(iter(loader))
    assert loader.last_indices is None
    assert loader.last_keys is None


def test_the_keys_of_samples_in_shards(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "%d.tar", maxcount=4) as writer:
        for number in range(10):
            writer.write({"__key__": f"sample{number}", "cls": number})
    dataset = TarDataset(writer.shards, "cls", {})
    loader = DataLoader(dataset, 3, shuffle=True, seed=0)
    for (labels,) in loader:
        assert loader.last_keys == [f"sample{number}" for number in labels.tolist()]
    subset = DataLoader(Subset(dataset, [7, 2]), 2)
    next(iter(subset))
    assert subset.last_keys == ["sample7", "sample2"]
    assert DataLoader(FakeDataset(3)).last_keys is None
