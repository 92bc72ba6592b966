"""How much memory batches take under a budget, where each may be a hundred times as large as the one before."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from headrace import DataLoader
from headrace.delivery.budget import Budget
from rays import RAY

LENGTH, SMALLEST = 200, 40_000


class Varying(Dataset[torch.Tensor]):
    """Samples of 40 KB to 4 MB."""

    def __init__(self) -> None:
        self.sizes = (SMALLEST * 100 ** np.random.default_rng(0).random(LENGTH)).astype(int)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((int(self.sizes[index]),), index % 250, dtype=torch.uint8)


def resident_bytes() -> int:
    """The shared memory that this process has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssShmem:")).split()[1]) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures by /proc")
@pytest.mark.parametrize(
    ("budget", "options"),
    [
        *((budget, {"multiprocessing_context": "fork"}) for budget in (8_000_000, 16_000_000, 32_000_000)),
        pytest.param(16_000_000, {"executor": RAY}, marks=pytest.mark.ray),
        pytest.param(16_000_000, {"executor": replace(RAY, shared_memory=False)}, marks=pytest.mark.ray),
    ],
    ids=["process-8", "process-16", "process-32", "ray-16", "ray-store-16"],
)
def test_a_budget_is_held(budget: int, options: dict[str, Any]) -> None:
    dataset = Varying()
    loader = DataLoader(dataset, None, num_workers=2, prefetch_factor=8, seed=0, max_prefetch_bytes=budget, **options)
    before, slots, resident, asked = resident_bytes(), 0, 0, 0
    reader = iter(loader)
    for index, batch in enumerate(reader):
        assert len(batch) == dataset.sizes[index]
        assert int(batch.sum()) == len(batch) * (index % 250)  # all of it is read, and so resident
        slots = max(slots, loader.stats().slot_bytes)
        resident = max(resident, resident_bytes() - before)
        asked = max(asked, len(reader._window._futures) if index < LENGTH - 1 else 0)
    largest = int(dataset.sizes.max()) * 9 // 8
    # Beside the budget there may be a batch that was larger than all before, and a spare slot. On Ray several tasks may
    # be in a message, with a slot for each.
    beside = 2 if loader.executor is None else 3
    assert slots <= budget + beside * largest
    if loader.executor is None:  # Ray's own shared memory would count, too
        assert resident <= budget + beside * largest
    assert asked + 2 >= min(16, budget // largest), "it is used"
    assert loader.stats().held_back > 0


def test_a_share_grows_by_one_when_as_many_have_come_as_it_has() -> None:
    share = Budget(100 * 9 // 8 * 6).share()
    found = []
    for _ in range(20):
        found.append(share.room(99, 0, 0)[0])
        share.note(100)
    assert found == [1, 2, 2, 3, 3, 3, *[4] * 4, *[4] * 10]
