"""Ranks of a mesh: those of one data-parallel share read the same, and `verify` compares them, too."""

from pathlib import Path
from typing import Any

import pytest

from headrace import DataLoader, World
from launch import run_ranks

JOB = Path(__file__).parent / "mesh_job.py"


def expected(share: int, shares: int) -> list[int]:
    loader = DataLoader(range(11), batch_size=2, shuffle=True, seed=0, distributed=World(share, shares))
    return [index for batch in loader for index in batch.tolist()]


@pytest.mark.slow
def test_ranks_of_one_share_read_the_same(tmp_path: Path) -> None:
    ranks: list[dict[str, Any]] = run_ranks(JOB, 4, tmp_path)
    for rank, told in enumerate(ranks):
        assert told["share"] == expected(rank // 2, 2)
        assert told["both"] == told["all"] == expected(rank, 4)
        assert told["world"] == [2]
        assert not told["verified"]
        assert "seed" in told["seeds"]
        assert "ranks 0-2: 0" in told["seeds"]
        assert "dataset_length" in told["lengths"]
        assert "rank 1: 12" in told["lengths"]
        assert "data" in told["missing"]
        assert "Pass mesh['dp']: ranks along 'tp' need the same batches." in told["whole"]
    streams = [told["stream"] for told in ranks]
    assert streams[0] == streams[1]
    assert streams[2] == streams[3]
    assert set(streams[0] + streams[2]) == set(range(11))
    assert not set(streams[0]) & set(streams[2]) - {0}
