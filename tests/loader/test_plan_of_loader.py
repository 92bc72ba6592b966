"""`loader.plan()`: what this rank reads, without reading it."""

from typing import Any

import pytest
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.map import SequenceWrapper

from headrace import DataLoader, Plan, Sequential, Shuffled, World


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


@pytest.mark.parametrize("size", [1, 3])
def test_it_says_what_comes(size: int) -> None:
    for rank in range(size):
        loader = DataLoader(range(23), 4, shuffle=True, seed=3, distributed=World(rank, size))
        plan = loader.plan()
        assert plan == Plan(Shuffled(), 23, 4, World(rank, size), "pad", 3)
        assert len(loader) == plan.steps(0)
        for epoch in range(2):
            assert [batch.tolist() for batch in loader] == [
                plan.batch(epoch, step).tolist() for step in range(plan.steps(0))
            ]


def test_it_draws_the_seed_that_iterating_takes() -> None:
    loader = DataLoader(range(23), 4, shuffle=True, tail="exact")
    seed = loader.plan().seed
    assert loader.plan().seed == seed
    next(iter(loader))
    assert loader.state_dict()["seed"] == seed


def test_it_is_that_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(range(8), 2)
    with pytest.raises(ValueError, match="torch's own samplers decide"):
        loader.plan()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert loader.plan() == Plan(Sequential(), 8, 2, World(1, 2))


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda: DataLoader(range(8)), "torch's own samplers decide"),
        (lambda: DataLoader(range(8), sampler=[1, 2]), "the sampler or batch_sampler"),
        (lambda: DataLoader(Numbers()), "an IterableDataset"),
        (lambda: DataLoader(SequenceWrapper([1, 2])), "datapipes"),
    ],
)
def test_without_a_plan_it_says_why(loader: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"follows no plan: {reason}"):
        loader().plan()
