"""The rule by which settings are compared: confidence bounds on the seconds per step.

A visit of a setting starts its workers, lets them warm up, and measures the seconds per step. What is compared are the
logarithms of these seconds, so that differences are ratios. The visits of one setting differ by the noise of the
machine. Its standard deviation sigma is pooled over all settings that were visited more than once, with a prior of 10 %
that counts as much as two such visits. A visit whose own batches vary more than that counts with its own deviation.

What else runs on the machine makes visits longer, seldom shorter, and often in bursts of seconds. So of the visits that
are compared the faster half counts, rounded up: a mean over all would let one burst decide.

A challenger is compared with the best setting so far by their means over visits that are near each other in time, so
that a change of the machine's load changes both. It is

- faster, if the difference of the means is larger than two standard errors (about 95 % confidence);
- out, if it cannot be faster by more than 3 %, by the same bounds;
- open otherwise: both are visited again, in turn, until each has four such visits. Then the means decide, and a
  difference of less than 3 % is none.

Whether a cheaper setting is equal to the fastest is decided in the same way, with up to eight visits of each as long as
the standard error is above 3 %.

Source: racing by confidence bounds after O. Maron and A. Moore, "Hoeffding Races" (1993), with normal bounds and paired
visits in the place of Hoeffding's.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from headrace.telemetry.stages import StageTimes
from headrace.tuning.settings import Setting

TOLERANCE = 0.03
"""Settings are equal whose seconds per step differ by less than this share."""

MOST_VISITS = 4
"""How often two settings are visited, at most, to be told apart."""

DEVIATIONS = 2.0
"""How many standard errors the bounds are from a mean."""

PRIOR_SIGMA = 0.1
PRIOR_WEIGHT = 2
"""The noise that is assumed before any is seen, and how many visits it counts as."""

REACH = 5
"""Visits are near each other in time that have fewer than so many others between them."""

NO_STAGES = StageTimes()


@dataclass(frozen=True)
class Visit:
    """What was measured in one visit of a setting.

    Attributes:
        seconds: Seconds per step: waiting for the batch, and using it.
        wait_s: The part of it in which the trainer waited.
        start_s: Seconds from `iter()` to the first batch.
        batches: How many batches were measured.
        spread: The standard error of log(seconds), as far as the batches of this visit show.
        stages: A worker's times for a batch.
        transport_s: Seconds in which the rank received and rebuilt a batch.
        rank_cpu_s: CPU seconds that the trainer's thread spent inside `next()` for a batch.
        queue_s: Seconds for a batch in which its thread could run, but had no CPU; 0 where that is not known.
        batch_bytes: The size of a batch, as far as it is known.
        cut: Whether the measurement was ended early, since the setting is much slower than the best so far.
    """

    seconds: float
    wait_s: float = 0.0
    start_s: float = 0.0
    batches: int = 1
    spread: float = 0.0
    stages: StageTimes = NO_STAGES
    transport_s: float = 0.0
    rank_cpu_s: float = 0.0
    queue_s: float = 0.0
    batch_bytes: int = 0
    cut: bool = False


class Numbered(NamedTuple):
    """A visit with its place in time.

    Attributes:
        number: How many visits came before.
        visit: The visit.
    """

    number: int
    visit: Visit


class Verdict(Enum):
    """What a comparison says about a challenger."""

    FASTER = "faster"
    OUT = "out"
    OPEN = "open"


@dataclass(frozen=True)
class Bounds:
    """A mean of seconds per step, and its confidence bounds."""

    low: float
    mean: float
    high: float


def noise(visits: Mapping[Setting, Sequence[Numbered]]) -> float:
    """Return the standard deviation of log(seconds) from one visit of a setting to the next."""
    total, count = PRIOR_WEIGHT * PRIOR_SIGMA**2, PRIOR_WEIGHT
    for found in visits.values():
        logs = [math.log(one.visit.seconds) for one in found if not one.visit.cut]
        if len(logs) > 1:
            mean = sum(logs) / len(logs)
            total += sum((log - mean) ** 2 for log in logs)
            count += len(logs) - 1
    return math.sqrt(total / count)


def bounds(visits: Sequence[Numbered], sigma: float) -> Bounds:
    """Return the mean and the bounds of one setting, from at least one visit."""
    mean, error = _mean(visits, sigma)
    return Bounds(*(math.exp(mean + times * DEVIATIONS * error) for times in (-1, 0, 1)))


def near(mine: Sequence[Numbered], others: Sequence[Numbered]) -> list[Numbered]:
    """Return those visits of one setting that are near in time to a visit of another."""
    return [one for one in mine if any(abs(one.number - other.number) <= REACH for other in others)]


def gain(challenger: Sequence[Numbered], best: Sequence[Numbered], sigma: float) -> tuple[float, float]:
    """Return how much a challenger differs from the best so far, and the standard error of that.

    Both as differences of log(seconds); a negative one means that the challenger is faster. Each needs a visit near one
    of the other's.
    """
    mine, my_error = _mean(near(challenger, best), sigma)
    other, other_error = _mean(near(best, challenger), sigma)
    return mine - other, math.hypot(my_error, other_error)


def compare(challenger: Sequence[Numbered], best: Sequence[Numbered], sigma: float, last: bool = False) -> Verdict:
    """Decide whether a challenger is faster than the best setting so far.

    Args:
        challenger: Its visits.
        best: Those of the best.
        sigma: The noise.
        last: Whether to decide by the means, since there will be no further visits.
    """
    difference, error = gain(challenger, best, sigma)
    if difference + DEVIATIONS * error < 0:
        return Verdict.FASTER
    if difference - DEVIATIONS * error > -TOLERANCE:
        return Verdict.OUT
    if last:
        return Verdict.FASTER if difference < -TOLERANCE else Verdict.OUT
    return Verdict.OPEN


def equal(cheaper: Sequence[Numbered], best: Sequence[Numbered], sigma: float, last: bool = False) -> bool | None:
    """Decide whether a cheaper setting is as good as the fastest one, within the tolerance; None if that is open."""
    difference, error = gain(cheaper, best, sigma)
    if difference + DEVIATIONS * error < TOLERANCE:
        return True
    if difference - DEVIATIONS * error > 0 and difference > TOLERANCE:
        return False
    return difference <= TOLERANCE if last else None


def _mean(visits: Iterable[Numbered], sigma: float) -> tuple[float, float]:
    """Return the mean of log(seconds) over the faster half of the visits, and its standard error."""
    logs, variances = [], []
    ordered = sorted((visit for _, visit in visits), key=lambda visit: visit.seconds)
    for visit in ordered[: (len(ordered) + 1) // 2]:
        logs.append(math.log(visit.seconds))
        variances.append(max(sigma, visit.spread) ** 2)
    return sum(logs) / len(logs), math.sqrt(sum(variances)) / len(logs)
