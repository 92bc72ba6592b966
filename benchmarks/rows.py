"""What a benchmark yields, and how two ways of doing the same are timed against each other."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure beside a rival's.

    Attributes:
        name: What was measured.
        ours: Our median.
        rival: The rival's median.
        rival_name: Who that is, and on what if not the same.
        unit: Of both.
        ratio: How many times better ours is.
        runs: How often each was run, in turn.
        spread: Largest minus smallest of our runs over their median.
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
        rival_name: Who that is.
        runs: How often to run each.
    """
    pairs = [(ours(), rival()) for _ in range(runs)]
    rows = []
    for number, (name, unit) in enumerate(names.items()):
        own = [pair[0][number] for pair in pairs]
        mine, theirs = statistics.median(own), statistics.median(pair[1][number] for pair in pairs)
        spread = (max(own) - min(own)) / mine if mine else 0.0
        rows.append(Row(name, mine, theirs, rival_name, unit, theirs / max(mine, 1e-9), runs, spread))
    return rows
