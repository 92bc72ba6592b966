"""Deferred: a loader yields the same batches as over the dataset itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    Dataset,
    Subset,
    TensorDataset,
)

from deferred_datasets import (
    CELLS,
    LENGTH,
    MAKERS,
    WRAPPERS,
    OnlyBulk,
    Stream,
    deferred,
    flat,
    seed_all,
    tensors,
)
from headrace import DataLoader, Deferred
from headrace.testing import FakeDataset


@pytest.fixture(params=[pytest.param(cell, id=name) for name, cell in CELLS.items()])
def cell(request: pytest.FixtureRequest) -> dict[str, Any]:
    options: dict[str, Any] = request.param
    return options


@pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws")
@pytest.mark.parametrize("wrap", WRAPPERS, ids=["plain", "subset", "concatenation", "stack"])
@pytest.mark.parametrize("seed", [7, None], ids=["plan", "parity"])
def test_bits_equal_the_datasets(cell: dict[str, Any], wrap: Callable[[Any], Any], seed: int | None) -> None:
    for make in MAKERS:
        made = []
        for dataset in (wrap(make()), wrap(deferred(make, length=LENGTH)), wrap(deferred(make))):
            seed_all()
            loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=seed, **cell)
            made.append([flat(loader), flat(loader), len(loader)])
        assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("wrap", "start_method"),
    [(WRAPPERS[0], "spawn"), (WRAPPERS[0], "forkserver"), (WRAPPERS[1], "forkserver")],
    ids=["plain-spawn", "plain-forkserver", "subset-forkserver"],
)
def test_bits_equal_the_datasets_in_workers_that_start_afresh(wrap: Callable[[Any], Any], start_method: str) -> None:
    options = {"num_workers": 2, "multiprocessing_context": start_method, "persistent_workers": True}
    expected = DataLoader(wrap(FakeDataset(LENGTH)), batch_size=4, shuffle=True, seed=7)
    loader = DataLoader(wrap(deferred(MAKERS[0], length=LENGTH)), batch_size=4, shuffle=True, seed=7, **options)
    assert [flat(loader), flat(loader)] == [flat(expected), flat(expected)]


@pytest.mark.parametrize("seed", [7, None])
@pytest.mark.parametrize("cell", [CELLS["inline"], CELLS["fork-2"]], ids=["inline", "fork-2"])
def test_streams_equal_the_datasets(cell: dict[str, Any], seed: int | None) -> None:
    made = []
    for dataset in (Stream(), deferred(Stream, iterable=True)):
        seed_all()
        loader = DataLoader(dataset, batch_size=2, seed=seed, **cell)
        made.append([flat(loader), flat(loader)])
    assert made[0] == made[1]
    assert {epoch for batch in made[0][1] for epoch in batch[1]} == {0 if seed is None else 1}


def test_a_streams_own_state_is_kept() -> None:
    made = []
    for make in (Stream, lambda: deferred(Stream, iterable=True)):
        loader, other = (DataLoader(make(), batch_size=2, seed=7, **CELLS["fork-2"]) for _ in range(2))
        reader = iter(loader)
        made.append(flat([next(reader) for _ in range(3)]))
        other.load_state_dict(loader.state_dict())
        made[-1] += [flat(other), flat(list(reader))]
        assert made[-1][-1] == made[-1][-2]
    assert made[0] == made[1]


def test_replaced_samples_equal_the_datasets(cell: dict[str, Any]) -> None:
    made = []
    for dataset in (OnlyEven(), Deferred(OnlyEven), Subset(Deferred(OnlyEven), range(LENGTH))):
        loader = DataLoader(dataset, batch_size=4, seed=7, on_error="replace", **cell)
        made.append([flat(loader), loader.stats().replacements])
        assert loader.stats().replaced == 5
    assert made[0] == made[1] == made[2]


class OnlyEven(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if index % 2:
            raise KeyError(index)
        return index


def test_a_bulk_call_alone_is_not_taken_for_single_ones() -> None:
    for dataset in (OnlyBulk(), Deferred(OnlyBulk, LENGTH)):
        loader = DataLoader(Subset(dataset, range(LENGTH)), batch_size=4, seed=7, on_error="replace")
        with pytest.raises(KeyError, match="broken"):
            next(iter(loader))


def test_in_memory_data_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = flat(DataLoader(tensors(), batch_size=4))
    monkeypatch.setattr(TensorDataset, "__getitem__", None)  # nobody needs it
    assert flat(DataLoader(Deferred(tensors), batch_size=4)) == expected
    with pytest.raises(TypeError, match="not callable"):
        flat(DataLoader(Deferred(tensors), batch_size=4, collate_fn=list))


def test_torchs_own_loader_takes_it() -> None:
    for make in MAKERS:
        loaders = [
            torch.utils.data.DataLoader(one, batch_size=4, num_workers=2) for one in (make(), Deferred(make, LENGTH))
        ]
        seed_all()
        expected = flat(list(loaders[0]))
        seed_all()
        assert flat(list(loaders[1])) == expected
    streams = [torch.utils.data.DataLoader(one, num_workers=2) for one in (Stream(), Deferred(Stream, iterable=True))]
    assert flat(list(streams[0])) == flat(list(streams[1]))
