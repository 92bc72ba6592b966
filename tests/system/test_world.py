"""The sources of rank and world size."""

import pytest
import torch.distributed as dist

from headrace import World
from headrace.system.world import resolve


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_alone() -> None:
    assert resolve(None) == resolve(True) == resolve(False) == World(0, 1)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    assert resolve(None) == World(0, 1), "a rank without a world size says nothing"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resolve(None) == resolve(True) == World(2, 4)
    assert resolve(False) == World(0, 1)
    assert resolve(World(1, 3)) == World(1, 3)


def test_a_group_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setenv("RANK", "2")
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert resolve(None) == World(0, 1)
    finally:
        dist.destroy_process_group()
