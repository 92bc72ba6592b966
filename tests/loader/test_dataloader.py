"""The loader under a plan: modes, shares, epochs, lengths."""

import warnings
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from headrace import Balanced, DataLoader, Sequential, Shuffled, Subset, Weighted, World
from headrace.testing import FakeDataset, ManualExecutor


def indices(loader: Any) -> list[list[int]]:
    """The sample indices of each batch of a loader over a FakeDataset."""
    return [batch["index"].tolist() for batch in loader]


def world_indices(size: int, **options: Any) -> list[list[list[int]]]:
    """What each rank of a world reads in one epoch."""
    return [indices(DataLoader(FakeDataset(11), distributed=World(rank, size), **options)) for rank in range(size)]


# Modes


@pytest.mark.parametrize(
    ("options", "planned"),
    [
        ({}, False),
        ({"shuffle": True, "num_workers": 1}, False),
        ({"executor": "inline"}, False),
        ({"seed": 0}, True),
        ({"order": Sequential()}, True),
        ({"tail": "pad"}, True),
        ({"distributed": False}, True),
        ({"distributed": World(0, 1)}, True),
        ({"executor": ManualExecutor(), "num_workers": 1}, True),
        ({"sampler": [0, 1], "seed": 3}, False),
        ({"batch_sampler": [[0, 1]], "tail": "exact"}, False),
    ],
)
@pytest.mark.filterwarnings("ignore:(tail|seed) is ignored")
def test_mode_in_a_world_of_one(options: dict[str, Any], planned: bool) -> None:
    assert DataLoader(FakeDataset(5), **options)._source.planned() is planned


def test_a_group_puts_the_loader_under_a_plan(group_of: Any) -> None:
    loader = DataLoader(FakeDataset(11), batch_size=2)
    assert indices(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    group_of(1, 4)
    assert indices(loader) == [[1, 5], [9]], "the world is found at iteration"
    assert len(loader) == 2


def test_a_group_of_one_is_no_group(group_of: Any) -> None:
    group_of(0, 1)
    torch.manual_seed(1)
    ours = list(DataLoader(FakeDataset(11), shuffle=True))
    torch.manual_seed(1)
    theirs = list(torch.utils.data.DataLoader(FakeDataset(11), shuffle=True))
    assert [batch["index"] for batch in ours] == [batch["index"] for batch in theirs]


def test_a_users_sampler_is_never_split(group_of: Any) -> None:
    group_of(1, 4)
    assert indices(DataLoader(FakeDataset(11), sampler=[3, 1, 4], batch_size=2)) == [[3, 1], [4]]
    assert indices(DataLoader(FakeDataset(11), batch_sampler=[[9], [2, 6]])) == [[9], [2, 6]]


def test_seed_is_zero_under_a_group_and_drawn_without(group_of: Any) -> None:
    torch.manual_seed(1)
    first = indices(DataLoader(FakeDataset(11), shuffle=True, tail="pad"))
    torch.manual_seed(2)
    loader = DataLoader(FakeDataset(11), shuffle=True, tail="pad")
    len(loader)  # draws nothing
    assert indices(loader) != first
    torch.manual_seed(1)
    assert indices(DataLoader(FakeDataset(11), shuffle=True, tail="pad")) == first
    group_of(0, 2)
    assert indices(DataLoader(FakeDataset(11), shuffle=True)) == world_indices(2, shuffle=True, seed=0)[0]


# Shares


def test_tails() -> None:
    assert world_indices(4, batch_size=2, tail="pad") == [[[0, 4], [8]], [[1, 5], [9]], [[2, 6], [10]], [[3, 7], [0]]]
    assert world_indices(4, batch_size=2) == world_indices(4, batch_size=2, tail="pad")
    assert world_indices(4, batch_size=2, tail="drop") == [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]]
    assert world_indices(4, batch_size=2, drop_last=True) == world_indices(4, batch_size=2, tail="drop")
    assert world_indices(4, batch_size=2, tail="exact") == [[[0, 4], [8]], [[1, 5], [9]], [[2, 6], [10]], [[3, 7]]]


def test_pad_reads_what_distributed_sampler_reads() -> None:
    for size in range(1, 14):
        for rank in range(size):
            theirs = list(DistributedSampler(FakeDataset(11), size, rank, shuffle=False))
            ours = DataLoader(FakeDataset(11), batch_size=3, distributed=World(rank, size), tail="pad")
            assert [index for batch in indices(ours) for index in batch] == theirs


def test_a_world_larger_than_the_dataset() -> None:
    assert world_indices(13, tail="pad") == [[[rank % 11]] for rank in range(13)]
    assert world_indices(13, tail="exact") == [[[rank]] for rank in range(11)] + [[], []]
    with pytest.warns(
        UserWarning, match="^tail=.drop. leaves .*11 samples are fewer than one global batch of 13 ranks"
    ):
        assert world_indices(13, tail="drop") == [[]] * 13


def test_lengths_are_those_of_the_epoch() -> None:
    for size in (1, 2, 3, 4, 13):
        for tail in ("pad", "drop", "exact"):
            for rank in range(size):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    loader = DataLoader(FakeDataset(11), batch_size=2, distributed=World(rank, size), tail=tail)
                    assert len(indices(loader)) == len(loader) == len(iter(loader)) == len(loader.batch_sampler)
                    assert sum(map(len, indices(loader))) == len(loader.sampler)


def test_without_batching() -> None:
    loader = DataLoader(FakeDataset(5), batch_size=None, distributed=World(1, 2), tail="exact")
    assert [sample["index"] for sample in loader] == [1, 3]


def test_orders() -> None:
    labels = [0] * 10 + [1]
    balanced = DataLoader(FakeDataset(11), batch_size=4, order=Balanced(labels), seed=1)
    assert [sum(labels[index] for index in batch) for batch in indices(balanced)[:2]] == [2, 2]
    weighted = DataLoader(FakeDataset(11), order=Weighted([0] * 10 + [1], num_samples=4), seed=1)
    assert indices(weighted) == [[10]] * 4
    assert indices(DataLoader(FakeDataset(11), batch_size=2, order=Subset([3, 1, 4]))) == [[3, 1], [4]]
    shuffled = DataLoader(FakeDataset(11), batch_size=9, order=Subset(range(2, 11)), shuffle=True, seed=1)
    first, second = indices(shuffled)[0], indices(shuffled)[0]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(2, 11))
    assert indices(DataLoader(FakeDataset(11), order=Shuffled(), seed=3)) == indices(
        DataLoader(FakeDataset(11), shuffle=True, seed=3)
    )


# Epochs


def test_an_epoch_advances_when_finished() -> None:
    loader = DataLoader(FakeDataset(11), shuffle=True, seed=1)
    epochs = [indices(loader) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    loader.set_epoch(1)
    assert indices(loader) == epochs[1]
    assert indices(loader) == epochs[2]


def test_peeking_does_not_advance_and_says_so_once() -> None:
    loader = DataLoader(FakeDataset(11), shuffle=True, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peek = next(iter(loader))
    with pytest.warns(UserWarning, match=r"epoch 0 was abandoned after 1 of 11 batches.*loader\.set_epoch\(1\)"):
        epoch = indices(loader)
    assert epoch[0] == peek["index"].tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(loader))
        next(iter(loader))


def test_reading_exactly_the_last_batch_finishes_the_epoch() -> None:
    loader = DataLoader(FakeDataset(11), shuffle=True, seed=1)
    first = list(islice(loader, len(loader)))
    assert [batch["index"].item() for batch in first] != [batch[0] for batch in indices(loader)]


def test_setting_the_epoch_of_an_abandoned_one_is_no_mistake() -> None:
    loader = DataLoader(FakeDataset(11), shuffle=True, seed=1)
    next(iter(loader))
    loader.set_epoch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_setting_the_epoch_between_iter_and_the_first_batch(workers: int) -> None:
    loader = DataLoader(FakeDataset(11), shuffle=True, seed=1, num_workers=workers)
    reader = iter(loader)
    loader.sampler.set_epoch(4)
    late = indices(reader)
    loader.set_epoch(4)
    assert indices(loader) == late
    assert loader._schedule.epoch == 5


def test_set_epoch_reaches_every_part_that_has_one() -> None:
    class Moody(FakeDataset):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    dataset = Moody(11)
    sampler = DistributedSampler(dataset, 2, 0)
    loader = DataLoader(dataset, sampler=sampler)
    loader.set_epoch(3)
    assert (dataset.epoch, sampler.epoch) == (3, 3)
    DataLoader(dataset, batch_sampler=BatchSampler(sampler, 2, False)).set_epoch(4)
    assert sampler.epoch == 4
    automatic = DataLoader(dataset)
    automatic.batch_sampler.set_epoch(2)  # type: ignore[union-attr]
    assert automatic._schedule.epoch == 2
    for wrong, error in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"epoch=.* is not allowed"):
            loader.set_epoch(wrong)  # type: ignore[arg-type]


# What frameworks look for


def test_the_automatic_sampler() -> None:
    sequential, shuffled = DataLoader(FakeDataset(11)), DataLoader(FakeDataset(11), shuffle=True)
    for loader, kind in ((sequential, SequentialSampler), (shuffled, RandomSampler)):
        assert isinstance(loader.sampler, kind)
        assert isinstance(loader.sampler, DistributedSampler)
        assert type(loader.batch_sampler) is BatchSampler
        assert loader.batch_sampler.sampler is loader.sampler
        assert loader.sampler.num_replicas == 1
        assert loader.sampler.rank == 0
    assert list(sequential.sampler) == list(range(11))
    planned = DataLoader(FakeDataset(11), batch_size=2, shuffle=True, seed=5, distributed=World(1, 4))
    assert list(planned.sampler) == [index for batch in indices(planned) for index in batch]
    assert planned.sampler.epoch == 1
    assert (planned.sampler.num_samples, planned.sampler.total_size, planned.sampler.seed) == (3, 12, 5)
    # A framework that rebuilds the loader around the sampler still gets this rank's share, once.
    planned.set_epoch(0)
    rebuilt = DataLoader(FakeDataset(11), batch_size=2, sampler=planned.sampler, seed=5)
    assert [index for batch in indices(rebuilt) for index in batch] == list(planned.sampler)


def test_own_arguments_are_kept_as_given() -> None:
    order = Sequential()
    loader = DataLoader(FakeDataset(3), seed=1, order=order, distributed=True, tail="exact", executor="inline")
    kept = {name: vars(loader)[name] for name in ("seed", "order", "distributed", "tail", "executor")}
    assert kept == {"seed": 1, "order": order, "distributed": True, "tail": "exact", "executor": "inline"}


@pytest.mark.parametrize("epoch", [2**70, 2**63, -1])
def test_an_epoch_that_no_key_can_hold_is_refused(epoch: int) -> None:
    loader = DataLoader(range(4), seed=1)
    with pytest.raises(ValueError, match=rf"epoch={epoch} is not allowed: expected an integer in \[0, {2**62}\]"):
        loader.set_epoch(epoch)
    loader.set_epoch(2**62)
    assert len(list(loader)) == 4
