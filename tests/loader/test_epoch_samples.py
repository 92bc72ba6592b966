"""epoch_samples: epochs of any number of samples, in every world, with workers, and resumed."""

from itertools import chain
from typing import Any

import pytest
import torch

from headrace import DataLoader, StateMismatch, Subset, World
from headrace.testing import FakeDataset


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(range(10), **{"batch_size": 2, "shuffle": True, "seed": 1, "epoch_samples": 6, **options})


def line(epochs: int, mine: DataLoader[Any]) -> list[int]:
    return [index for _ in range(epochs) for batch in mine for index in batch.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_are_cut_from_an_endless_sequence(workers: int) -> None:
    mine = loader(num_workers=workers, persistent_workers=workers > 0)
    assert len(mine) == 3
    read = line(10, mine)
    assert mine.epoch == 10
    for start in range(0, 60, 10):
        assert sorted(read[start : start + 10]) == list(range(10))
    assert read[:10] != read[10:20]
    assert read[:10] == line(1, loader(epoch_samples=None)), "the first pass is the order's own first epoch"


def test_an_epoch_may_be_longer_than_the_dataset() -> None:
    read = line(1, loader(epoch_samples=25))
    assert [sorted(read[start : start + 10]) for start in (0, 10)] == [list(range(10))] * 2
    assert len(set(read[20:])) == 5


def test_ranks_share_it() -> None:
    ranks = [loader(distributed=World(rank, 2), batch_size=1) for rank in range(2)]
    assert [len(rank) for rank in ranks] == [3, 3]
    steps = [batch.tolist() for _ in range(5) for pair in zip(*ranks, strict=True) for batch in pair]
    assert list(chain(*steps)) == line(5, loader())


def test_it_goes_on_in_another_world() -> None:
    mine = loader(epoch_samples=8)
    list(mine)
    reading = iter(mine)
    next(reading)
    next(reading)
    state = mine.state_dict()
    assert (state["epoch"], state["samples"]) == (1, 4)
    rest = line(1, reading)
    ranks = [loader(epoch_samples=8, distributed=World(rank, 2), batch_size=1) for rank in range(2)]
    for one in ranks:
        one.load_state_dict(state)
    assert [index for pair in zip(*ranks, strict=True) for batch in pair for index in batch.tolist()] == rest
    with pytest.raises(StateMismatch, match=r"Endless\('Shuffled\(\)', 8\).*Endless\('Shuffled\(\)', 6\)"):
        loader().load_state_dict(state)


def test_every_epoch_can_be_asked_for() -> None:
    mine = loader()
    whole = line(4, mine)
    mine.set_epoch(2)
    assert line(1, mine) == whole[12:18]


def test_it_makes_a_plan_by_itself_and_needs_no_shuffle() -> None:
    torch.manual_seed(0)
    mine = DataLoader(range(10), batch_size=2, epoch_samples=6)
    assert line(3, mine) == [*range(10), *range(8)]
    assert mine.plan().samples == 6


def test_a_subset_is_shuffled_within_itself() -> None:
    read = line(2, loader(order=Subset([3, 4, 5]), epoch_samples=3))
    assert [sorted(read[:3]), sorted(read[3:])] == [[3, 4, 5]] * 2


def test_noise_differs_where_a_sample_comes_again() -> None:
    class Noisy(FakeDataset):
        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(())

    mine = DataLoader(Noisy(3), epoch_samples=9, seed=0)
    drawn = [value.item() for _, value in mine]
    assert len(set(drawn)) == 9
