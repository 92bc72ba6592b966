"""What is asked for in advance within a budget."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from delivery.manual import made, outstanding, run
from headrace import Budget, DataLoader, DeliveryTimeout


class Sized(Dataset[torch.Tensor]):
    """Sample n has sizes[n] bytes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sizes[index],), index, dtype=torch.uint8)


def test_the_budget_bounds_what_is_asked_for_by_the_largest_batch_of_late() -> None:
    loader, executor = made(dataset=Sized(*[100] * 4, 800, *[100] * 200), max_prefetch_bytes=500, prefetch_factor=4)
    reader = iter(loader)
    (pool,) = executor.pools
    assert outstanding(pool, 0) == 1, "the first batch is asked for alone"
    for taken in range(4):
        run(reader, pool, taken, 1)
        expected = 2 if taken > 1 else 1  # 4 x 112.5 bytes fit, with the one that is handed over and the one before
        assert outstanding(pool, taken + 1) == expected
    run(reader, pool, 4, 2)
    for taken in range(6, 133):
        assert outstanding(pool, taken) == 0, "a batch as large as the largest does not fit beside another"
        with pytest.raises(DeliveryTimeout):
            next(reader)
        assert outstanding(pool, taken) == 1, "the one that is waited for"
        run(reader, pool, taken, 1)
    assert loader.stats().held_back > 100
    for taken in range(133, 140):
        pool.complete(taken)
        next(reader)
    assert outstanding(pool, 140) == 2, "that large one was long ago"


def test_loaders_share_a_budget_in_equal_parts() -> None:
    budget = Budget(1400)
    one, executor = made(dataset=Sized(*[100] * 20), max_prefetch_bytes=budget, prefetch_factor=5)
    reader = iter(one)
    one._share._most = 99
    (pool,) = executor.pools
    run(reader, pool, 0, 1)
    assert outstanding(pool, 1) == 10
    other, _ = made(dataset=Sized(*[100] * 20), max_prefetch_bytes=budget)
    run(reader, pool, 1, 1)
    assert outstanding(pool, 2) == 10, "the other is not read yet"
    iter(other)
    run(reader, pool, 2, 6)
    assert outstanding(pool, 8) == 4
    del other
    run(reader, pool, 8, 1)
    assert outstanding(pool, 9) == 10


def test_loaders_share_cpus() -> None:
    budget = Budget(10**6, cpus=3)
    train, executor = made(dataset=Sized(*[100] * 20), max_prefetch_bytes=budget, prefetch_factor=4)
    training = iter(train)
    train._share._most = 99
    (pool,) = executor.pools
    run(training, pool, 0, 1)
    assert outstanding(pool, 1) == 3
    evaluation, executor = made(dataset=Sized(*[100] * 20), max_prefetch_bytes=budget, prefetch_factor=4)
    evaluating = iter(evaluation)
    evaluation._share._most = 99
    (other,) = executor.pools
    assert outstanding(other, 0) == 1, "one is always allowed"
    run(evaluating, other, 0, 1)
    assert outstanding(other, 1) == 3, "what the other asked for before is computed by now"
    run(training, pool, 1, 1)
    assert outstanding(pool, 2) == 2, "both are read"
    run(evaluating, other, 1, 1)
    assert outstanding(other, 2) == 2


def test_copies_of_a_loader_share_its_budget() -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "seed": 0}
    loader = DataLoader(Sized(*[100] * 6), max_prefetch_bytes=Budget(400), **options)
    iter(loader)
    copied = copy.deepcopy(loader)
    assert copied.max_prefetch_bytes is loader.max_prefetch_bytes
    assert copied._share is None
    iter(copied)
    assert loader._share._budget.part_bytes() == 200
    assert pickle.loads(pickle.dumps(loader.max_prefetch_bytes)).part_bytes() == 400


def test_two_readers_of_a_loader_have_one_share() -> None:
    loader, executor = made(dataset=Sized(*[100] * 20), max_prefetch_bytes=500, persistent_workers=True)
    reader = iter(loader)
    loader._share._most = 99
    (pool,) = executor.pools
    run(reader, pool, 0, 1)
    assert outstanding(pool, 1) == 2
    iter(loader)
    assert outstanding(pool, 1) == 3


def test_the_limit_is_not_reached_where_it_is_large() -> None:
    loader, executor = made(12, max_prefetch_bytes=10**12)
    reader = iter(loader)
    run(reader, executor.pools[0], 0, 12)
    assert loader.stats().held_back == 0


@dataclass
class Batch:
    data: torch.Tensor


@pytest.mark.parametrize("form", [Batch, lambda data: data.to_sparse(), lambda data: {"a": [data]}])
def test_threads_keep_a_budget_of_batches_of_any_form(form: Any) -> None:
    data = [torch.ones(1000, dtype=torch.float32)] * 8
    loader = DataLoader(
        data,
        1,
        num_workers=2,
        executor="thread",
        collate_fn=lambda batch: form(batch[0]),
        max_prefetch_bytes=9000,
        prefetch_factor=4,
    )
    assert len([*loader]) == 8
    assert [*loader._share._sizes] == [4000] * 8


def test_the_next_epoch_counts_too() -> None:
    loader, executor = made(dataset=Sized(*[100] * 6), max_prefetch_bytes=500, persistent_workers=True)
    reader = iter(loader)
    (pool,) = executor.pools
    for number in range(6):
        pool.complete(number)
        next(reader)
    assert next(reader, None) is None
    assert outstanding(pool, 6) == 3


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize("options", [{"seed": 0}, {"sampler": range(10)}, {}])
@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:seed is ignored")
def test_every_kind_of_loader_keeps_a_budget(options: dict[str, Any]) -> None:
    for dataset in (Sized(*[20_000] * 10), Numbers()):
        if isinstance(dataset, Numbers) and "sampler" in options:
            continue
        for workers in (1, 2):
            limits: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"}
            loader = DataLoader(dataset, 1, **options, **limits, max_prefetch_bytes=1)
            assert len([*loader]) == (10 if isinstance(dataset, Sized) else 10 * workers)


def test_a_budget_is_copied_for_other_loaders() -> None:
    budget = Budget(5, 2)
    assert repr(budget) == "Budget(5, cpus=2)"
    assert repr(Budget(*budget.__reduce__()[1])) == repr(budget)


def test_what_is_refused() -> None:
    for call, error, text in (
        (lambda: Budget(0), ValueError, "max_bytes=0 is not allowed"),
        (lambda: Budget(1, cpus=0), ValueError, "cpus=0 is not allowed"),
    ):
        with pytest.raises(error, match=text):
            call()  # type: ignore[no-untyped-call]
