"""Actors end with the rank that made them."""

import json
from pathlib import Path

import psutil
import pytest

from launch import Ranks
from waiting import wait_until

JOB = Path(__file__).parent / "jobs" / "ray_faults.py"


@pytest.mark.ray
@pytest.mark.slow
def test_actors_of_a_rank_that_is_killed_are_gone(tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    rank = Ranks(JOB, 1, tmp_path, "rank", RAY_ADDRESS=address)
    try:
        wait_until(lambda: (tmp_path / "rank0.txt").exists() and "]\n" in (tmp_path / "rank0.txt").read_text())
        told = (tmp_path / "rank0.txt").read_text().splitlines()
        actors = [psutil.Process(pid) for pid in json.loads(next(line for line in told if line.startswith("[")))]
        assert len(actors) == 2
    finally:
        rank.kill()
    wait_until(lambda: not any(actor.is_running() for actor in actors))
