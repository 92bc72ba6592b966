"""The examples keep what they promise; one is run by torchrun, the others in the environment that it makes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launch import Ranks
from waiting import wait_until

EXAMPLES = Path(__file__).parent.parent / "examples"
DDP = EXAMPLES / "ddp.py"
RANK = Path(__file__).parent / "rank.py"
LIMIT_S = 120


def check(printed: str) -> None:
    accuracies = re.findall(r"^accuracy ([01]\.\d+) on 359\b", printed, re.MULTILINE)
    assert len(accuracies) == 1, "rank 0 alone prints, and each test sample is counted once"
    assert float(accuracies[0]) >= 0.95


@pytest.mark.slow
def test_ddp(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(RANK), str(DDP)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    check(run.stdout)


@pytest.mark.slow
def test_ddp_alone(tmp_path: Path) -> None:
    check(Ranks(DDP, 1, tmp_path).finish())


@pytest.mark.slow
def test_ddp_resume_ends_with_the_weights_of_a_run_that_was_not_killed(tmp_path: Path) -> None:
    def finish(run: Ranks) -> tuple[str, int]:
        printed = run.finish()
        ((steps, weights),) = re.findall(r"^after (\d+) steps .* the weights are (\w{64})$", printed, re.MULTILINE)
        return weights, int(steps)

    script = EXAMPLES / "ddp_resume.py"
    undisturbed, steps = finish(Ranks(script, 2, tmp_path, "undisturbed.pt"))
    killed = Ranks(script, 2, tmp_path, "killed.pt")
    wait_until((tmp_path / "killed.pt").exists, LIMIT_S)
    assert all(rank.is_alive() for rank in killed.processes)
    killed.kill()
    weights, steps_left = finish(Ranks(script, 2, tmp_path, "killed.pt"))
    assert 0 < steps_left < steps
    assert weights == undisturbed


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("ray_single.py", 1), ("ray_data_parallel.py", 1), ("ray_ddp.py", 2)])
def test_where_samples_are_made_changes_no_digit(name: str, size: int, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    printed = []
    for executor in ("inline", "ray"):
        ranks = Ranks(EXAMPLES / name, size, tmp_path, "--epochs", "2", "--executor", executor, RAY_ADDRESS=address)
        out = ranks.finish()
        ((accuracy, loss),) = re.findall(r"^accuracy (\S+), loss (\S+), \d+\.\d s$", out, re.MULTILINE)
        printed.append((accuracy, loss))
        assert ("no GPU here" in out) == ("data_parallel" in name and not torch.cuda.is_available())
    assert printed[0] == printed[1]
    assert float(printed[0][0]) > 0.5, "it learns"


def test_examples_are_short() -> None:
    assert len(DDP.read_text().splitlines()) < 60
    for script in EXAMPLES.glob("ray_*.py"):
        assert len(script.read_text().splitlines()) < 90
