"""What the example of texts of varying length says of its batches, alone and on two ranks."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from launch import Ranks

VARIABLE_LENGTH = Path(__file__).parents[2] / "examples" / "variable_length.py"
BUDGET = 8192


class Row(NamedTuple):
    """A row of the table that the example prints."""

    steps: int
    padding: float
    largest: int
    apart: float


def table(told: str) -> dict[str, Row]:
    number = r"([\d,.]+)"
    row = rf"^(\w+) +{number} +{number}% +{number} +{number}% +\d+ ms ± \d+%$"
    rows = re.findall(row, told, re.MULTILINE)
    return {name: Row(int(a), float(b), int(c.replace(",", "")), float(d)) for name, a, b, c, d in rows}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_of_similar_length_keep_the_budget_and_need_little_padding(ranks: int, tmp_path: Path) -> None:
    told = Ranks(VARIABLE_LENGTH, ranks, tmp_path).finish()
    rows = table(told)
    assert list(rows) == ["random", "bucketed"], "rank 0 alone prints, each row once"
    random, bucketed = rows.values()
    assert bucketed.steps >= 20
    assert bucketed.largest <= BUDGET < random.largest
    assert bucketed.padding < 15
    assert random.padding > 50
    if ranks > 1:
        assert random.apart > 50
        assert bucketed.apart <= 10, "the ranks' batches at a step are of one bucket"
    ((count, again),) = re.findall(r"^of (\d+) batches of one epoch (\d+) come again in the next$", told, re.MULTILINE)
    assert int(count) == ranks * bucketed.steps
    assert int(again) < int(count) / 10, "each epoch is shuffled anew"
    ((twice,),) = [re.findall(r"^every text is read: True, (\d+) of them twice$", told, re.MULTILINE)]
    assert int(twice) < ranks
    assert "an epoch resumed after 5 steps goes on with the same batches: True" in told
