"""Torch computes every batch with one thread, and the caller's number of threads is kept."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from headrace import DataLoader, Deferred
from headrace.system.torch_threads import begin_with_torch_threads, one_torch_thread


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def of_new_threads() -> int:
    """The number of torch's threads in a thread that starts now."""
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


class Sums(Dataset[Any]):
    """Each sample is a sum that several threads would round differently, and the number of threads."""

    def __init__(self) -> None:
        self.torch_threads = torch.get_num_threads()
        self.numbers = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0))
        self.square = self.numbers.reshape(512, 256)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        numbers = self.numbers * (index + 1) / 3
        product = self.square @ self.square.T * index
        return numbers.sum(), numbers.norm(), torch.fft.fft(numbers)[:9], product[:9], torch.get_num_threads()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        begun = torch.get_num_threads()
        return (begun * torch.get_num_threads() for _ in range(4))


class Failing(Sums):
    def __getitem__(self, index: int) -> Any:
        raise KeyError(index)


def build() -> list[int]:
    return [torch.get_num_threads()] * 4


def read(dataset: Any, **options: Any) -> list[Any]:
    """Read a plan's batches, and check that the caller's number of threads is unchanged."""
    batches = []
    for batch in DataLoader(dataset, **{"seed": 5, "batch_size": 3} | options):
        assert torch.get_num_threads() == of_new_threads() == 2
        batches.append(batch)
    assert torch.get_num_threads() == of_new_threads() == 2
    return batches


EXECUTORS: list[dict[str, Any]] = [
    {"executor": "inline"},
    {"executor": "inline", "fetch_threads": 2},
    {"executor": "thread", "num_workers": 2},
    {"executor": "thread", "num_workers": 2, "timeout": 60},
    {"executor": "thread", "num_workers": 1, "fetch_threads": 2},
    {"num_workers": 2, "fetch_threads": 2},
]


@pytest.mark.parametrize("options", EXECUTORS)
def test_large_sums_are_the_same_bits(options: dict[str, Any]) -> None:
    expected = read(Sums(), num_workers=1)
    for batch, reference in zip(read(Sums(), **options), expected, strict=True):
        assert batch[-1].tolist() == [1, 1, 1]
        assert all(torch.equal(one, other) for one, other in zip(batch, reference, strict=True))


@pytest.mark.parametrize("options", [EXECUTORS[0], EXECUTORS[2], EXECUTORS[-1]])
def test_what_is_built_late_is_built_alike(options: dict[str, Any]) -> None:
    assert [batch.tolist() for batch in read(Deferred(build), **options)] == [[1, 1, 1], [1]]


@pytest.mark.parametrize("options", [{"executor": "inline"}, {"executor": "thread", "num_workers": 1}])
def test_streams(options: dict[str, Any]) -> None:
    (batch,) = read(Stream(), batch_size=4, **options)
    assert batch.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("options", EXECUTORS[:4])
def test_errors_leave_the_callers_number(options: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        read(Failing(), **options)
    assert torch.get_num_threads() == of_new_threads() == 2


def test_loaders_within_loaders() -> None:
    inner = Sums()

    class Nested(Sums):
        def __getitem__(self, index: int) -> Any:
            (batch,) = DataLoader(inner, batch_size=6, seed=index)
            return batch[0].sum(), torch.get_num_threads()

    for batch in read(Nested()):
        assert batch[1].tolist() == [1, 1, 1]


def test_where_torch_decides_it_computes_as_torch_does() -> None:
    assert all(batch[-1].tolist() == [2] for batch in DataLoader(Sums()))


def test_a_new_thread_may_have_a_number_of_its_own() -> None:
    seen: list[int] = []

    def work() -> None:
        begin_with_torch_threads(3)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (seen, torch.get_num_threads(), of_new_threads()) == ([3], 2, 2)


def test_one_within_one() -> None:
    with one_torch_thread():
        with one_torch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
