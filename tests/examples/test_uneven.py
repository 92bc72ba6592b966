"""What the example of unequal steps says: how ranks end, and how it is found that they disagree, come late or skip."""

import re
from pathlib import Path

import pytest

from launch import Ranks

UNEVEN = Path(__file__).parents[2] / "examples" / "uneven_join.py"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_unequal_steps_end_and_what_differs_between_ranks_is_found(size: int, tmp_path: Path) -> None:
    told = Ranks(UNEVEN, size, tmp_path).finish()
    steps = {1: [11], 2: [6, 5], 3: [4, 4, 4]}[size]
    assert f"Join: steps {steps} equal weights: True\n" in told

    ((right, by_sum, by_average),) = re.findall(
        r"^right: (\d+) in one process; (\d+) of 321 by SUM; (\S+) by AVG$", told, re.MULTILINE
    )
    assert by_sum == right
    exact = float(by_average) == pytest.approx(int(right), abs=1e-3)
    assert exact == (size != 2), "on two ranks shares are unequal"
    assert ("a rank is late: Operation timed out!" in told) == (size > 1)

    assert ("verify: ranks disagree:" in told) == (size > 1)
    for rank in range(size if size > 1 else 0):
        assert re.search(rf"^  dataset_length .*rank {rank}: {321 - 5 * rank}\b", told, re.MULTILINE)

    longest = max(steps)
    alone, together = ([longest - (rank == 1) for rank in range(size)], [longest - (size > 1)] * size)
    assert f"steps of {longest}, skipped alone: {alone}, together: {together}\n" in told
