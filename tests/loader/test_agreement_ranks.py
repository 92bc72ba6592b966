"""`DataLoader.verify` on real ranks: all of them hear the same, and the loader stays as it was."""

from pathlib import Path

import pytest
import torch

from headrace import DataLoader
from headrace.errors import StateMismatch
from launch import run_ranks

JOB = Path(__file__).parent / "agreement_job.py"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_real_ranks(size: int, tmp_path: Path) -> None:
    told = run_ranks(JOB, size, tmp_path)
    for name, text in told[0].items():
        assert all(other[name] == text for other in told), "every rank says the same"
        if name.startswith("agree"):
            assert not text, name
            continue
        lines = text.splitlines()
        fact = name.partition(",")[0]
        assert lines[0] == "ranks disagree:", name
        assert lines[1].split()[0] == fact, text
        assert f"rank {size - 1}: " in lines[1] or fact in ("rank", "first_steps"), text
        assert len(lines) < 12, text
    assert f"rank {size - 1}: OSError: the file list is missing" in told[0]["error"]
    assert len(told[0]) == 33


def test_alone_there_is_nobody_to_disagree_with() -> None:
    before = torch.get_rng_state()
    loaders = [DataLoader(range(5)), DataLoader(range(5), seed=1), DataLoader(range(5), sampler=[1, 2])]
    for loader in loaders:
        loader.verify()
        assert loader._schedule.epoch == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_world_in_the_environment_needs_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StateMismatch, match="init_process_group"):
        DataLoader(range(5)).verify()


def test_a_loader_that_cannot_read_says_why() -> None:
    with pytest.raises(StateMismatch, match=r"rank 0: ValueError: .*empty") as raised:
        DataLoader([], seed=1).verify()
    assert isinstance(raised.value.__cause__, ValueError)
