"""The examples run as their readers would run them, and keep what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from launch import RANK
from waiting import wait_until

EXAMPLES = Path(__file__).parent.parent / "examples"
DDP = EXAMPLES / "ddp.py"
LIMIT_S = 120


def start(script: Path, size: int | None, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a script in a folder of its own, on so many ranks, or as it is if that is None."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", str(RANK)]
    return subprocess.Popen(
        [sys.executable, *(launcher if size else []), str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_ddp(size: int, tmp_path: Path) -> None:
    run = start(DDP, size, tmp_path)
    out, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, out + err
    printed = re.findall(r"^accuracy ([01]\.\d+) on 359\b", out, re.MULTILINE)
    assert len(printed) == 1, "rank 0 alone prints, and each test sample is counted once"
    assert float(printed[0]) >= 0.95


@pytest.mark.slow
def test_ddp_resume_ends_with_the_weights_of_a_run_that_was_not_killed(tmp_path: Path) -> None:
    def finish(run: subprocess.Popen[str]) -> tuple[str, int]:
        out, err = run.communicate(timeout=LIMIT_S)
        assert run.returncode == 0, out + err
        ((steps, weights),) = re.findall(r"^after (\d+) steps .* the weights are (\w{64})$", out, re.MULTILINE)
        return weights, int(steps)

    script = EXAMPLES / "ddp_resume.py"
    undisturbed, steps = finish(start(script, 2, tmp_path, "undisturbed.pt"))
    killed = start(script, 2, tmp_path, "killed.pt")
    wait_until((tmp_path / "killed.pt").exists, LIMIT_S)
    ranks = psutil.Process(killed.pid).children()
    assert len(ranks) == 2
    for rank in ranks:
        rank.kill()
    killed.communicate(timeout=LIMIT_S)
    assert killed.returncode != 0
    weights, steps_left = finish(start(script, 2, tmp_path, "killed.pt"))
    assert 0 < steps_left < steps
    assert weights == undisturbed


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("ray_single.py", None), ("ray_data_parallel.py", None), ("ray_ddp.py", 2)])
def test_where_samples_are_made_changes_no_digit(
    name: str, size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    runs = [
        start(EXAMPLES / name, size, tmp_path, "--epochs", "2", "--executor", executor)
        for executor in ("inline", "ray")
    ]
    printed = []
    for run in runs:
        out, err = run.communicate(timeout=LIMIT_S)
        assert run.returncode == 0, out + err
        ((accuracy, loss),) = re.findall(r"^accuracy (\S+), loss (\S+), \d+\.\d s$", out, re.MULTILINE)
        printed.append((accuracy, loss))
        assert ("no GPU here" in out) == ("data_parallel" in name and not torch.cuda.is_available())
    assert printed[0] == printed[1]
    assert float(printed[0][0]) > 0.5, "it learns"


def test_examples_are_short() -> None:
    assert len(DDP.read_text().splitlines()) < 60
    for script in EXAMPLES.glob("ray_*.py"):
        assert len(script.read_text().splitlines()) < 90
