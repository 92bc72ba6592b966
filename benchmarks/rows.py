"""The rows that a benchmark yields, and timing two ways of doing the same in turn."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure, compared with a rival's.

    Attributes:
        name: What was measured.
        ours: Our median.
        rival: The rival's median.
        rival_name: The rival, and its data if not the same.
        unit: The unit of both.
        ratio: The rival's median over ours.
        runs: How often each was run, in turn.
        spread: The largest less the smallest of our runs, over their median.
    """

    name: str
    ours: float
    rival: float
    rival_name: str
    unit: str
    ratio: float
    runs: int
    spread: float

    def __str__(self) -> str:
        return (
            f"{self.name:<44} {self.ours:>10.3g} {self.unit:<4} {self.rival_name}: {self.rival:.4g} {self.unit}  "
            f"({self.ratio:,.3g} times less, {self.runs} runs, spread {self.spread:.0%})"
        )


Runs = Sequence[tuple[float, ...]]
"""The figures that each run of one way returned."""


def in_turn(ways: Mapping[str, Callable[[], tuple[float, ...]]], runs: int) -> dict[str, Runs]:
    """Run each way once, then each again, and so on, so that a busy moment does not affect one way alone."""
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, run in ways.items():
            taken[name].append(run())
    return dict(taken)


def compared(names: dict[str, str], ours: Runs, rival: Runs, rival_name: str) -> list[Row]:
    """Compare the medians of each figure.

    Args:
        names: Each figure's name and unit, in the order of the runs' tuples.
        ours: Our runs.
        rival: The rival's.
        rival_name: The rival.
    """
    rows = []
    for number, (name, unit) in enumerate(names.items()):
        own = [run[number] for run in ours]
        mine, theirs = statistics.median(own), statistics.median(run[number] for run in rival)
        spread = (max(own) - min(own)) / mine if mine else 0.0
        rows.append(Row(name, mine, theirs, rival_name, unit, theirs / max(mine, 1e-9), len(own), spread))
    return rows


def less_is_better(
    names: dict[str, str],
    ours: Callable[[], tuple[float, ...]],
    rival: Callable[[], tuple[float, ...]],
    rival_name: str,
    runs: int,
) -> list[Row]:
    """Run both in turn and compare the medians of each figure that they return.

    Args:
        names: Each figure's name and unit, in the order of the returned tuples.
        ours: One run of ours.
        rival: One run of the rival's.
        rival_name: The rival.
        runs: How often to run each.
    """
    taken = in_turn({"ours": ours, "rival": rival}, runs)
    return compared(names, taken["ours"], taken["rival"], rival_name)
