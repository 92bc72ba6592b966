"""Iterable datasets on ranks: read whole, dealt on demand, seeded."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    IterableDataset,
)

from headrace import DataLoader, World
from headrace.testing import FakeDataset


def indices(loader: Any) -> list[list[int]]:
    """The sample indices of each batch of a loader over a FakeDataset."""
    return [batch["index"].tolist() for batch in loader]


class Numbers(IterableDataset[int]):
    """0 … 10."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(11))

    def __len__(self) -> int:
        return 11


class Noise(IterableDataset[float]):
    """Five random numbers."""

    def __iter__(self) -> Iterator[float]:
        return (torch.rand(()).item() for _ in range(5))


def test_streams_are_split_only_on_demand(group_of: Any) -> None:
    group_of(1, 4)
    with pytest.warns(UserWarning, match="distributed=False to say so.* reads the whole of it: pass distributed=True"):
        assert [number for (number,) in DataLoader(Numbers())] == list(range(11))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(DataLoader(Numbers(), distributed=False))) == 11
    with pytest.warns(UserWarning, match="RANK=1 and WORLD_SIZE=4") as caught:
        assert [number.item() for number in DataLoader(Numbers(), distributed=True, tail="exact")] == [1, 5, 9]
    assert len(caught) == 1


def test_an_environment_without_a_group_is_told_of_once(group_of: Any) -> None:
    """A child of a rank inherits the variables, and would read a share of the data without a word."""
    group_of(0, 4)
    loader = DataLoader(FakeDataset(8))
    said = r"RANK=0 and WORLD_SIZE=4 are set and no process group .* share 0 of 4 .* distributed=False"
    with pytest.warns(UserWarning, match=said) as caught:
        assert indices(loader) == indices(loader) == [[0], [4]]
    assert [str(one.message).partition(" ")[0] for one in caught] == ["RANK=0"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(DataLoader(FakeDataset(8), distributed=False))) == 8
        assert len(list(DataLoader(FakeDataset(8), distributed=World(0, 4)))) == 2
        assert len(list(DataLoader(FakeDataset(8), sampler=[3, 1], distributed=False))) == 2, "which nobody splits"
        group_of(0, 1)
        assert len(list(DataLoader(FakeDataset(8)))) == 8


def test_a_group_is_believed_whatever_the_environment_says(group_of: Any) -> None:
    group_of(0, 4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(DataLoader(FakeDataset(8)))) == 8
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("tail", "shares"),
    [
        ("exact", [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7]]),
        ("drop", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("pad", [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 3]]),
    ],
)
def test_a_split_stream(tail: Any, shares: list[list[int]]) -> None:
    for rank in range(4):
        loader = DataLoader(Numbers(), batch_size=None, distributed=World(rank, 4), tail=tail)
        assert list(loader) == list(loader) == shares[rank]
        batched = DataLoader(Numbers(), batch_size=2, distributed=World(rank, 4), tail=tail)
        assert len(list(batched)) == len(batched) == (len(shares[rank]) + 1) // 2


def test_a_stream_shorter_than_the_world() -> None:
    shares = [
        list(DataLoader(Numbers(), batch_size=None, distributed=World(rank, 13), tail="pad")) for rank in range(13)
    ]
    assert shares == [[rank] for rank in range(11)] + [[0], [0]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_seeded_stream(workers: int) -> None:
    loader = DataLoader(Noise(), batch_size=None, seed=3, num_workers=workers)
    first, second = list(loader), list(loader)
    assert first != second
    torch.rand(1)
    again = DataLoader(Noise(), batch_size=None, seed=3)
    assert [list(again), list(again)] == [first, second]


def test_a_seeded_stream_that_is_abandoned_starts_again() -> None:
    loader = DataLoader(Noise(), batch_size=None, seed=3)
    first = next(iter(loader))
    with pytest.warns(UserWarning, match="epoch 0 was abandoned after 1 batches"):
        assert next(iter(loader)) == first


def test_a_split_stream_is_the_same_stream_on_every_rank() -> None:
    whole = list(DataLoader(Noise(), batch_size=None, seed=3, distributed=World(0, 1)))
    parts = [list(DataLoader(Noise(), batch_size=None, seed=3, distributed=World(r, 2), tail="exact")) for r in (0, 1)]
    assert [parts[place % 2][place // 2] for place in range(5)] == whole
