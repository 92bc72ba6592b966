"""What the examples of balanced and weighted sampling say, on one rank and on two."""

import re
from pathlib import Path

import pytest
from matplotlib.image import imread

from launch import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
BLUE, ORANGE, GREEN = (31, 119, 180), (255, 127, 14), (44, 160, 44)
COUNTS = [128, 80, 50, 32, 20, 12, 8, 6, 4, 2]
WAY = re.compile(
    r"^(\S+), batches of (\d+) on each of (\d) ranks\n"
    r"((?:  step \d, rank \d: \[.+\]\n)+)"
    r"  a batch has (\d+) to (\d+) of a class, the epoch \[(.+)\]\n"
    r"  samples of the steps: (\w{8})$",
    re.MULTILINE,
)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


@pytest.mark.slow
def test_each_batch_of_each_rank_has_equally_many_of_each_class(tmp_path: Path) -> None:
    digests = []
    for ranks in 1, 2:
        told = Ranks(EXAMPLES / "class_balanced.py", ranks, tmp_path).finish()
        shuffled, even, uneven = WAY.findall(told)
        assert [way[0] for way in (shuffled, even, uneven)] == ["shuffle=True", *["order=Balanced(labels)"] * 2]
        assert [int(way[1]) for way in (shuffled, even, uneven)] == [40 // ranks, 40 // ranks, 28 // ranks]
        assert {way[2] for way in (shuffled, even, uneven)} == {str(ranks)}

        of_class = 4 // ranks
        assert (int(even[4]), int(even[5])) == (of_class, of_class)
        batches = re.findall(r"step (\d), rank (\d): \[(.+)\]", even[3])
        assert [(int(step), int(rank)) for step, rank, _ in batches] == [(s, r) for s in (0, 1) for r in range(ranks)]
        assert all(numbers(counts) == [of_class] * 10 for _, _, counts in batches)
        assert numbers(even[6]) == [48] * 10, "12 whole global batches of 495 samples"

        assert int(uneven[5]) - int(uneven[4]) == 1, "28 and 14 are no multiples of ten"
        of_epoch = numbers(uneven[6])
        assert sum(of_epoch) == 17 * 28
        assert max(of_epoch) - min(of_epoch) == 1

        assert int(shuffled[5]) - int(shuffled[4]) > 1
        assert max(numbers(shuffled[6])) > 8 * min(numbers(shuffled[6]))
        digests.append([way[7] for way in (shuffled, even, uneven)])
    assert digests[0] == digests[1], "the ranks of a step read together what one rank reads"
    assert len(set(digests[0])) == 3


@pytest.mark.slow
def test_weights_make_rare_classes_frequent_and_better_recognised(tmp_path: Path) -> None:
    row = re.compile(r"^\| (\d) " + r"\| (\d+) \| ([01]\.\d\d) " * 3 + r"\|$", re.MULTILINE)
    figure = tmp_path / "counts.png"
    one = Ranks(EXAMPLES / "imbalanced.py", 1, tmp_path).finish()
    assert not figure.exists()
    two = Ranks(EXAMPLES / "imbalanced.py", 2, tmp_path, "--plot", str(figure)).finish()
    colours = set(map(tuple, (imread(figure)[..., :3].reshape(-1, 3) * 255).round().astype(int).tolist()))
    assert {BLUE, ORANGE, GREEN} <= colours, "matplotlib's first three, one for each way"
    reads = []
    for told in one, two:
        rows = row.findall(told)
        assert [int(cells[0]) for cells in rows] == list(range(10))
        shuffled, weighted, once = ([int(cells[column]) for cells in rows] for column in (1, 3, 5))
        assert shuffled == COUNTS
        assert sum(weighted) == sum(COUNTS)
        assert max(weighted) < 2.5 * min(weighted), "each class is drawn about equally often"
        assert sum(once) == 100
        assert all(drawn <= there for drawn, there in zip(once, COUNTS, strict=True)), "none is drawn twice"
        assert once[5:] == [12, 7, 6, 4, 2], "rare samples are nearly all drawn"
        reads.append([shuffled, weighted, once])
        plain, better, _ = ([float(cells[column]) for cells in rows] for column in (2, 4, 6))
        assert better[9] > plain[9] + 0.1, "the rarest class"
        assert sum(better) > sum(plain)
        means = re.findall(r"^mean of the classes: (\S+) (\S+) (\S+)$", told, re.MULTILINE)
        assert abs(float(means[0][1]) - sum(better) / 10) < 0.006
    assert reads[0] == reads[1], "the epoch does not depend on the number of ranks"
