"""Means of a loader's batches, with their errors, from rounds of them."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self


class Round(NamedTuple):
    """Sums over consecutive steps: seconds.

    Attributes:
        steps: The number of steps.
        step_s: Seconds from asking for a batch to asking for the next one.
        wait_s: The part of these in which the trainer waited for the workers.
        work_s: Seconds that workers spent on the batches.
        cpu_s: CPU seconds of these.
        work_squares: The squares of the seconds of work.
    """

    steps: int
    step_s: float
    wait_s: float
    work_s: float
    cpu_s: float
    work_squares: float

    @classmethod
    def of(cls, steps: Sequence[Sequence[float]]) -> Self:
        """Sum over steps, each with the four times above."""
        step_s, wait_s, work_s, cpu_s = map(sum, zip(*steps, strict=True))
        return cls(len(steps), step_s, wait_s, work_s, cpu_s, sum(one[2] * one[2] for one in steps))


@dataclass(frozen=True)
class Figures:
    """Means over rounds, for a batch.

    Attributes:
        rounds: The number of rounds.
        steps: The number of steps.
        step_s: Seconds of a step.
        own_s: Those of them that the trainer spends on other things than waiting.
        work_s: Seconds that a worker spends on a batch.
        cpu_s: CPU seconds of these.
        waiting: The share of its time that the trainer waits.
        step_error: The standard error of `step_s`, relative to it.
        own_error: That of `own_s`.
        work_error: That of `work_s`.
        waiting_error: The standard error of `waiting`.
        spread: The standard deviation of the work on a batch, relative to its mean.
    """

    rounds: int
    steps: int
    step_s: float
    own_s: float
    work_s: float
    cpu_s: float
    waiting: float
    step_error: float
    own_error: float
    work_error: float
    waiting_error: float
    spread: float


def figures(rounds: Collection[Round], spread: float = 0.0) -> Figures | None:
    """Return the means; None without two rounds that took time.

    Errors are those of means of independent rounds. Within a round, batches depend on each other: those that were
    computed at the same time come together.

    Args:
        rounds: The rounds.
        spread: The spread of the work that was seen before. A few rounds may lack the batches that take long, so the
            errors of work and steps are at least those of as many batches with this spread.
    """
    count, step_s = len(rounds), sum(one.step_s for one in rounds)
    if count < 2 or step_s <= 0:
        return None
    steps, work_s = sum(one.steps for one in rounds), sum(one.work_s for one in rounds)
    waiting = sum(one.wait_s for one in rounds) / step_s
    of_waiting = [one.wait_s - waiting * one.step_s for one in rounds]
    own = [one.step_s - one.wait_s for one in rounds]
    variance = sum(one.work_squares for one in rounds) / steps - (work_s / steps) ** 2
    here = math.sqrt(max(0.0, variance)) / (work_s / steps) if work_s > 0 else 0.0
    least_error = max(spread, here) / math.sqrt(steps)
    return Figures(
        rounds=count,
        steps=steps,
        step_s=step_s / steps,
        own_s=sum(own) / steps,
        work_s=work_s / steps,
        cpu_s=sum(one.cpu_s for one in rounds) / steps,
        waiting=waiting,
        step_error=max(_relative_error([one.step_s for one in rounds]), waiting * least_error),
        own_error=_relative_error(own),
        work_error=max(_relative_error([one.work_s for one in rounds]), least_error),
        waiting_error=math.sqrt(sum(one * one for one in of_waiting) * count / (count - 1)) / step_s,
        spread=here,
    )


def _relative_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean, relative to the mean; 0 where that is 0."""
    count, total = len(values), sum(values)
    if total <= 0:
        return 0.0
    mean = total / count
    return math.sqrt(sum((one - mean) ** 2 for one in values) / (count - 1) / count) / mean
