"""The rule of comparison: bounds that shrink with visits, noise that is learned, and visits that are near in time."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from headrace.tuning.race import (
    MOST_VISITS,
    PRIOR_SIGMA,
    TOLERANCE,
    Numbered,
    Verdict,
    Visit,
    bounds,
    compare,
    equal,
    gain,
    near,
    noise,
)
from headrace.tuning.settings import Setting


def visits(*seconds: float, start: int = 0, by: int = 2) -> list[Numbered]:
    return [Numbered(start + by * place, Visit(one)) for place, one in enumerate(seconds)]


def interleaved(mine: Sequence[float], others: Sequence[float]) -> tuple[list[Numbered], list[Numbered]]:
    return visits(*mine), visits(*others, start=1)


def test_noise_is_the_prior_until_settings_are_visited_again() -> None:
    assert noise({}) == noise({Setting(): visits(1.0)}) == PRIOR_SIGMA


def test_noise_is_learned_from_repeated_visits_of_any_setting() -> None:
    rng = np.random.default_rng(0)
    found = {Setting(workers=count): visits(*(count * np.exp(0.2 * rng.standard_normal(20)))) for count in range(1, 9)}
    assert noise(found) == pytest.approx(0.2, rel=0.1)
    quiet = {Setting(workers=count): visits(*[float(count)] * 20) for count in range(1, 9)}
    assert noise(quiet) < PRIOR_SIGMA / 4


def test_visits_that_were_cut_short_are_no_noise() -> None:
    cut = [Numbered(0, Visit(1.0)), Numbered(1, Visit(9.0, cut=True))]
    assert noise({Setting(): cut}) == PRIOR_SIGMA


def test_bounds_shrink_with_the_root_of_the_visits_that_count() -> None:
    one, four = bounds(visits(2.0), 0.1), bounds(visits(2.0, 2.0, 2.0, 2.0), 0.1)
    assert one.mean == pytest.approx(2.0)
    assert math.log(one.high / one.mean) == pytest.approx(0.2)
    assert math.log(four.high / four.mean) == pytest.approx(0.2 / math.sqrt(2))
    assert math.log(four.mean / four.low) == pytest.approx(0.2 / math.sqrt(2))


def test_the_faster_half_of_the_visits_counts() -> None:
    assert bounds(visits(2.0, 6.0), 0.1) == bounds(visits(2.0), 0.1)
    assert bounds(visits(6.0, 2.0, 9.0, 2.0), 0.1) == bounds(visits(2.0, 2.0, 2.0), 0.1)
    assert bounds(visits(2.0, 4.0, 9.0), 0.1).mean == pytest.approx(math.sqrt(8.0))
    challenger, best = interleaved([1.0, 1.0], [0.7, 2.1])
    assert compare(challenger, best, 0.05) is Verdict.OUT, "the best was measured in a burst, once"


def test_a_visit_whose_batches_vary_counts_with_their_deviation() -> None:
    steady, varying = [Numbered(0, Visit(1.0))], [Numbered(0, Visit(1.0, spread=0.5))]
    assert math.log(bounds(varying, 0.1).high) == pytest.approx(1.0)
    assert math.log(bounds(steady, 0.1).high) == pytest.approx(0.2)


def test_only_visits_near_in_time_are_compared() -> None:
    """The machine became slow after the best setting's first visits: what is faster now is faster."""
    best = [*visits(1.0, 1.0, 1.0), *visits(3.0, start=40)]
    challenger = visits(2.0, start=41)
    assert near(best, challenger) == visits(3.0, start=40)
    difference, _ = gain(challenger, best, 0.01)
    assert difference == pytest.approx(math.log(2 / 3))
    assert compare(challenger, best, 0.01) is Verdict.FASTER


@pytest.mark.parametrize(
    ("mine", "last", "expected"),
    [
        ([0.5], False, Verdict.FASTER),
        ([2.0], False, Verdict.OUT),
        ([0.95], False, Verdict.OPEN),
        ([1.0], False, Verdict.OPEN),
        ([1.2], False, Verdict.OUT),
        ([0.95], True, Verdict.FASTER),
        ([0.98], True, Verdict.OUT),
    ],
)
def test_faster_out_or_open(mine: list[float], last: bool, expected: Verdict) -> None:
    challenger, best = interleaved(mine, [1.0])
    assert compare(challenger, best, 0.05, last) is expected


def test_more_visits_decide_what_one_left_open() -> None:
    challenger, best = interleaved([0.9] * MOST_VISITS, [1.0] * MOST_VISITS)
    assert compare(challenger[:1], best[:1], 0.05) is Verdict.OPEN
    assert compare(challenger, best, 0.05) is Verdict.FASTER


@pytest.mark.parametrize(
    ("mine", "sigma", "last", "expected"),
    [
        ([1.0], 0.001, False, True),
        ([0.8], 0.05, False, True),
        ([1.0], 0.05, False, None),
        ([1.0], 0.05, True, True),
        ([1 + TOLERANCE / 2], 0.05, True, True),
        ([1 + 2 * TOLERANCE], 0.05, True, False),
        ([1.5], 0.05, False, False),
    ],
)
def test_equal_within_the_tolerance(mine: list[float], sigma: float, last: bool, expected: bool | None) -> None:
    cheaper, best = interleaved(mine, [1.0])
    assert equal(cheaper, best, sigma, last) is expected


@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_the_bounds_are_seldom_wrong(ratio: float) -> None:
    """Of 400 races between settings of which one is 1.25 times slower, in noise of 10 %."""
    wrong = undecided = 0
    rng = np.random.default_rng(1)
    for _ in range(400):
        logs = 0.1 * rng.standard_normal((2, MOST_VISITS))
        mine, others = interleaved((ratio * np.exp(logs[0])).tolist(), np.exp(logs[1]).tolist())
        verdicts = (compare(mine[:count], others[:count], 0.1) for count in range(1, MOST_VISITS + 1))
        verdict = next((one for one in verdicts if one is not Verdict.OPEN), Verdict.OPEN)
        wrong += verdict is (Verdict.FASTER if ratio > 1 else Verdict.OUT)
        undecided += verdict is Verdict.OPEN
    assert wrong <= 8
    assert undecided < 120  # of four visits two count; then the means decide
