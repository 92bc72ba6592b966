"""The examples run as their readers would run them, and keep what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launch import RANK
from waiting import wait_until

EXAMPLES = Path(__file__).parent.parent / "examples"
DDP = EXAMPLES / "ddp.py"
LIMIT_S = 120


def start(script: Path, size: int, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a script on several ranks, in a folder of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    return subprocess.Popen(
        [*command, str(RANK), str(script), *arguments],
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


def test_ddp_is_short() -> None:
    assert len(DDP.read_text().splitlines()) < 60
