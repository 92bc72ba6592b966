"""What samples draw is a matter of their positions, not of who computes them."""

from typing import Any

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    TensorDataset,
)
from torch.utils.data import Subset as TorchSubset

from headrace import DataLoader, Weighted, World
from headrace.testing import FakeDataset


def indices(loader: Any) -> list[list[int]]:
    """The sample indices of each batch of a loader over a FakeDataset."""
    return [batch["index"].tolist() for batch in loader]


class Bulk(FakeDataset):
    """A user's dataset that fetches several samples at once."""

    def __getitems__(self, wanted: list[int]) -> list[Any]:
        return [self[index] for index in wanted]


def draws(dataset: Dataset[Any], **options: Any) -> dict[int, float]:
    """Each sample's random draw in one epoch over a world of one."""
    loader = DataLoader(dataset, shuffle=True, seed=3, collate_fn=list, **options)
    return {
        sample["index"]: sample["torch"] + sample["random"] + sample["numpy"] for batch in loader for sample in batch
    }


def test_draws_do_not_depend_on_batch_size_workers_or_world() -> None:
    expected = draws(FakeDataset(11))
    assert len(set(expected.values())) == 11
    assert draws(FakeDataset(11), batch_size=4) == expected
    assert draws(FakeDataset(11), batch_size=3, num_workers=2) == expected
    parts = [draws(FakeDataset(11), batch_size=2, distributed=World(rank, 3), tail="exact") for rank in range(3)]
    assert parts[0] | parts[1] | parts[2] == expected


def test_torchs_wrappers_are_looked_through() -> None:
    expected = draws(FakeDataset(11))
    assert draws(TorchSubset(FakeDataset(11), range(11)), batch_size=4) == expected
    assert draws(ConcatDataset([FakeDataset(11)]), batch_size=4) == expected
    stacked = StackDataset(FakeDataset(11))
    loader = DataLoader(stacked, shuffle=True, seed=3, collate_fn=list, batch_size=4)
    assert {
        one["index"]: one["torch"] + one["random"] + one["numpy"] for batch in loader for (one,) in batch
    } == expected


def test_bulk_datasets_draw_per_batch() -> None:
    assert draws(Bulk(11), batch_size=4) == draws(Bulk(11), batch_size=4, num_workers=2)
    assert draws(Bulk(11), batch_size=4) != draws(FakeDataset(11), batch_size=4)
    assert draws(TorchSubset(Bulk(11), range(11)), batch_size=4) == draws(Bulk(11), batch_size=4)


def test_repeats_of_a_sample_draw_anew() -> None:
    loader = DataLoader(FakeDataset(2), order=Weighted([1, 0], num_samples=5), seed=3, batch_size=5)
    batch = next(iter(loader))
    assert batch["index"].tolist() == [0] * 5
    assert len(set(batch["torch"].tolist())) == 5


def test_collation_is_seeded_too() -> None:
    def noisy(samples: list[Any]) -> float:
        return torch.rand(()).item()

    one = list(DataLoader(FakeDataset(11), batch_size=2, seed=3, collate_fn=noisy))
    assert list(DataLoader(FakeDataset(11), batch_size=2, seed=3, collate_fn=noisy, num_workers=2)) == one
    assert len(set(one)) == len(one)


def test_samples_differ_between_epochs_and_seeds() -> None:
    loader = DataLoader(TensorDataset(torch.arange(3)), seed=1, collate_fn=lambda _: torch.rand(()).item())
    assert list(loader) != list(loader)


class Odd(FakeDataset):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 2:
            raise OSError("no such file")
        return super().__getitem__(index)


def test_replacing_broken_samples_is_a_matter_of_positions() -> None:
    """So the loader follows a plan, with a seed that is drawn if none is given."""
    runs = []
    for _ in range(2):
        torch.manual_seed(4)
        loader = DataLoader(Odd(9), on_error="replace", batch_size=2)
        assert loader.on_error == "replace"
        runs.append([(batch["index"].tolist(), batch["torch"].tolist()) for batch in loader])
        assert [one.position for one in loader.stats().replacements] == [1, 3, 5, 7]
    assert runs[0] == runs[1]
    with pytest.raises(OSError, match="no such file"):
        list(DataLoader(Odd(9), batch_size=2))
