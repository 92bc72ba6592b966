"""Arguments beside which others are ignored: what is known only when iteration begins, and what is not warned about."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from headrace import (
    DataLoader,
    Sequential,
    Subset,
    Weighted,
)
from loader.argument_cases import Numbers, arguments

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore:This DataLoader will create")]


class Unknown(RandomSampler):
    """Knows of no ranks."""


class Splits(Unknown):
    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self._rank, self._world_size = 1, 2


class Around:
    """Batches of what another sampler draws."""

    def __init__(self, base_sampler: Any) -> None:
        self.base_sampler = base_sampler

    def __iter__(self) -> Any:
        return ([index] for index in self.base_sampler)


SPLIT = "distributed=False says that it is meant"
IN_A_WORLD: dict[str, tuple[dict[str, Any], str]] = {
    "a random sampler": ({"sampler": RandomSampler(range(5))}, f"what its RandomSampler draws.*{SPLIT}"),
    "a sequential sampler": ({"sampler": SequentialSampler(range(5))}, "what its SequentialSampler draws"),
    "a subset": ({"sampler": torch.utils.data.SubsetRandomSampler([1])}, "what its SubsetRandomSampler draws"),
    "weights": ({"sampler": torch.utils.data.WeightedRandomSampler([1.0], 1)}, "WeightedRandomSampler draws.*Weighted"),
    "batches": ({"batch_sampler": BatchSampler(RandomSampler(range(5)), 2, False)}, "what its RandomSampler draws"),
    "no batches": ({"sampler": RandomSampler(range(5)), "batch_size": None}, "what its RandomSampler draws"),
    "an own sampler": ({"sampler": Unknown(range(5))}, f"your Unknown.*{SPLIT}"),
    "own batches": ({"batch_sampler": Around(Unknown(range(5)))}, f"your Around.*rank and num_replicas.*{SPLIT}"),
    "a list": ({"batch_sampler": [[0, 1]]}, f"your list.*{SPLIT}"),
    "a stream": ({"dataset": Numbers()}, "an IterableDataset is read as it is on every rank"),
    "a seeded stream": ({"dataset": Numbers(), "seed": 1}, "an IterableDataset is read as it is on every rank"),
    "a generator": ({"generator": torch.Generator()}, "generator is ignored: 2 ranks split the epoch.*Pass seed="),
    "a generator and a dealt stream": (
        {"dataset": Numbers(), "distributed": True, "generator": torch.Generator()},
        "generator is ignored: 2 ranks split the epoch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_A_WORLD)
def test_several_ranks_are_told_once_what_has_no_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, text = IN_A_WORLD[name]
    loader = DataLoader(**arguments(**options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)  # alone there is nothing to tell
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=text) as caught:
        _ = [list(loader) for _ in range(2)]
    told = [one for one in caught if not str(one.message).startswith("RANK=1")]  # there is no group
    assert len(told) == 1
    assert {one.filename for one in caught} == {__file__}


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": torch.utils.data.DistributedSampler(range(5), 2, 0)},
        {"sampler": RandomSampler(range(5)), "distributed": False},
        {"sampler": Unknown(range(5)), "distributed": False},
        {"sampler": Splits(range(5))},
        {"batch_sampler": Around(Splits(range(5)))},
        {"batch_sampler": BatchSampler(torch.utils.data.DistributedSampler(range(5), 2, 0), 2, False)},
        {"shuffle": True, "generator": torch.Generator(), "distributed": False},
        {"sampler": [0, 1], "generator": torch.Generator(), "distributed": False},
        {"shuffle": True, "seed": 1},
        {"order": Weighted([1.0] * 5), "shuffle": True},
        {"order": Subset([1, 2, 3]), "shuffle": True},
        {"order": Subset([1, 2, 3]), "shuffle": False},
        {"order": Sequential(), "shuffle": False},
        {"seed": 0, "worker_init_fn": print, "in_order": False},
        {"executor": "inline", "worker_init_fn": print, "in_order": False},
        {"dataset": range(5), "executor": "thread", "num_workers": 2, "persistent_workers": True, "timeout": 60},
        {"dataset": Numbers(), "distributed": True, "tail": "exact"},
        {"distributed": False, "tail": "exact"},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_what_has_an_effect_is_not_warned_about(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "This DataLoader will create")
        warnings.filterwarnings("ignore", "RANK=1 and WORLD_SIZE=2")  # there is no group
        loader = DataLoader(**arguments(**options))
        list(loader)
        loader._iterator = None
