"""The examples run as their readers would run them, and keep what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch import RANK

DDP = Path(__file__).parent.parent / "examples" / "ddp.py"
LIMIT_S = 120


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_ddp(size: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={size}",
            str(RANK),
            str(DDP),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = re.findall(r"^accuracy ([01]\.\d+) on 359\b", done.stdout, re.MULTILINE)
    assert len(printed) == 1, "rank 0 alone prints, and each test sample is counted once"
    assert float(printed[0]) >= 0.95


def test_ddp_is_short() -> None:
    assert len(DDP.read_text().splitlines()) < 60
