"""Starting real ranks: a script under torch.distributed.run, and what each rank reported."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 150
RANK = Path(__file__).parent / "rank.py"


def run_ranks(script: Path, size: int, folder: Path, *arguments: str) -> list[Any]:
    """Run a script on `size` ranks and return each rank's report, by rank.

    The script gets the folder as its first argument, and calls `report(folder, rank, value)`.
    """
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    done = subprocess.run(
        [*command, str(RANK), str(script), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def report(folder: str, rank: int, value: Any) -> None:
    """Write a rank's report; called in the rank."""
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(value))
