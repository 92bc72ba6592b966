"""Accelerate gathers the batches of an order that cuts them itself: ranks have equally many samples at each step."""

from pathlib import Path

import pytest

from launch import run_ranks


@pytest.mark.slow
def test_accelerate_gathers_each_sample_once(tmp_path: Path) -> None:
    one, other = run_ranks(Path(__file__).parent / "jobs" / "bucketed.py", 2, tmp_path)
    assert one["gathered"] == other["gathered"]
    assert sorted(one["gathered"]) == list(range(601))
    assert one["sizes"] == other["sizes"]
    assert len(set(one["sizes"])) > 3
    for told in (one, other):
        assert told["ends"] == [False] * (told["len"] - 1) + [True]
        assert told["skipped"] == told["whole"][5:]
