"""The seeds that workers begin with under a seed of the loader's: of the epoch, the rank and the worker."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from headrace import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:RANK=", "ignore:an IterableDataset is read as it is")

BEGUN: list[int] = []


def note(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.seed == torch.initial_seed()
    BEGUN[:] = [worker_id, info.seed]


class Begun(Dataset[list[int]]):
    """Each sample is the worker, and the seed that it began with."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> list[int]:
        return list(BEGUN)


class BegunStream(IterableDataset[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(BEGUN)] * 8)


def seeds(dataset: Any, epochs: int = 2, **options: Any) -> list[dict[int, int]]:
    """Return the seed of each worker in each epoch."""
    options = {"num_workers": 2, "seed": 3, "batch_size": None, "worker_init_fn": note} | options
    loader = DataLoader(dataset, **options)
    return [dict(map(list, loader)) for _ in range(epochs)]


@pytest.mark.parametrize(
    ("dataset", "options", "shared"),
    [(Begun(), {"num_workers": 1}, False), (BegunStream(), {}, False), (BegunStream(), {"distributed": True}, True)],
    ids=["plan", "stream", "dealt stream"],
)
def test_each_epoch_rank_and_worker_has_its_own(
    dataset: Any, options: dict[str, Any], shared: bool, group_of: Any
) -> None:
    """Ranks that deal one stream have the same: each reads all of it. A plan's worker may be too late for any batch."""
    found = []
    for rank in range(2):
        group_of(rank, 2)
        found.append(seeds(dataset, **options))
        assert seeds(dataset, **options) == found[rank]
        assert seeds(dataset, 1, **options | {"seed": 4}) != found[rank][:1]
    every = [seed for rank in found[: 1 if shared else 2] for epoch in rank for seed in epoch.values()]
    assert len(set(every)) == len(every) == options.get("num_workers", 2) * (2 if shared else 4)
    assert (found[0] == found[1]) == shared


@pytest.mark.parametrize("dataset", [Begun(), BegunStream()], ids=["plan", "stream"])
def test_workers_that_persist_keep_theirs(dataset: Any) -> None:
    first, second = seeds(dataset, num_workers=1, persistent_workers=True)
    assert first == second == seeds(dataset, 1, num_workers=1)[0]


def test_a_stream_that_goes_on_has_the_seeds_that_its_workers_had() -> None:
    options: dict[str, Any] = {"num_workers": 1, "seed": 3, "batch_size": None, "worker_init_fn": note}
    loader = DataLoader(BegunStream(), persistent_workers=True, **options)
    ((_, seed), *_) = list(loader)
    next(iter(loader))
    other = DataLoader(BegunStream(), **options)
    other.load_state_dict(loader.state_dict())
    assert {one for _, one in other} == {seed}
