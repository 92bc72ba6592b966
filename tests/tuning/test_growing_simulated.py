"""Growing pools in virtual time: 200 random loads, and wrong rules that these find.

A load is constant, exponential, log-normal, or has bursts: one batch in twenty takes ten times as long. It sleeps, or
computes on some CPUs, or both, or reads from storage that serves so many workers at a time. New workers come up after
some time, and their first batches take twice as long.

What is required of each load:

- After 30 batches a worker of the best fixed number, 600 steps take no more than 1 / 0.9 of what they take with the
  best fixed number of 1 to 16 workers. CPU-bound work is compared with numbers that the CPUs are for: more would help
  there only as a longer queue does. Where storage is the limit and batches vary, 1 / 0.75 is allowed: the difference
  between four workers and eight is small there, and cannot be seen in so few batches.
- It does not oscillate. From then on no number comes again more than four times in 2,000 steps, since attempts become
  rarer, and between going back and growing again there are eight rounds or more.
- Work that the CPUs limit never has more workers than the CPUs can keep busy. Where storage serves so many workers at a
  time, and batches are alike, there are on average no more than twice as many, and one.
"""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from headrace.tuning import growing
from headrace.tuning.growing import Growing
from tuning.virtual_pool import Load, Run, run, times

SEEDS = 200
MOST = 16
FIXED = (1, 2, 3, 4, 6, 8, 12, 16)
WORK_S = 0.02
SETTLED, MEASURED, STEPS = 30, 600, 2_500
KINDS = ("constant", "exponential", "lognormal", "bursts")


@dataclass(frozen=True)
class Case:
    """A load, and what may be expected with it.

    Attributes:
        load: The load.
        cpus: CPUs that the loader knows of.
        most: The largest number of workers that it is compared with.
        share: The share of the best throughput that is required.
        mean: The largest mean number of workers in the end.
    """

    load: Load
    cpus: float
    most: int
    share: float
    mean: float


def case(seed: int) -> Case:
    draw = np.random.default_rng(seed)
    kind, own_kind = KINDS[seed % 4], ("constant", "lognormal")[seed // 4 % 2]
    shape = ("sleep", "cpu", "storage", "mixed")[seed // 8 % 4]
    own_s = WORK_S / draw.uniform(0.3, 14) if draw.random() > 0.2 else 1e-4
    cpus, channels, part = 10**6, 10**6, {"sleep": 0.02, "cpu": 1.0, "storage": 0.01}.get(shape, draw.uniform(0.1, 0.9))
    if shape == "storage":
        channels = int(draw.integers(1, 9))
    elif shape != "sleep":
        cpus = int(draw.integers(1, 9))
    work = times(draw, kind, WORK_S, STEPS)
    load = Load(
        [(1 - part) * one for one in work],
        [part * one for one in work],
        times(draw, own_kind, own_s, STEPS),
        cpus,
        channels,
        up_s=float(draw.choice([0.0, 0.02, 0.06])),
    )
    most = MOST if cpus == 10**6 else min(MOST, math.ceil(cpus / part))
    hard = shape == "storage" and kind != "constant"
    fewest = 2 * channels + 1 if shape == "storage" and kind == "constant" else MOST
    return Case(load, float(cpus) if cpus < 10**6 else math.inf, most, 0.75 if hard else 0.9, fewest)


def grown(one: Case) -> Run:
    return run(one.load, 1, Growing(1, MOST, cpus=one.cpus))


def faults(seed: int) -> list[str]:
    """Return what is wrong with a load, in words."""
    one = case(seed)
    last = SETTLED * MOST + MEASURED
    fixed = {workers: run(one.load, workers, steps=last) for workers in FIXED if workers <= one.most}
    best_s = min(each.step_s(100, 600) for each in fixed.values())
    workers = min(count for count, each in fixed.items() if each.step_s(100, 600) <= best_s / 0.95)
    first = SETTLED * workers
    best_s = min(each.step_s(first, first + MEASURED) for each in fixed.values())
    found = grown(one)
    share = best_s / found.step_s(first, first + MEASURED)
    wrong = []
    if share < one.share:
        wrong.append(f"{share:.0%} of the best fixed number")
    moves = found.moves()
    seen = [size for at, size in moves if at > first]
    again = max(Counter([found.sizes[first], *seen]).values()) - 1
    if again > 4:
        wrong.append(f"a number came again {again} times: {moves}")
    before = 1
    for (at, size), (later, more) in pairwise(moves):
        if size < before and more > size and later - at < 8 * max(2, size):
            wrong.append(f"it grew {later - at} steps after it had become {size}: {moves}")
        before = size
    if max(found.sizes) > math.ceil(one.most) and math.isfinite(one.cpus) and not any(one.load.sleep_s):
        wrong.append(f"{max(found.sizes)} workers on {one.cpus:g} CPUs")
    mean = sum(found.sizes[-1000:]) / 1000
    if mean > one.mean:
        wrong.append(f"{mean:.1f} workers for storage that serves {one.load.channels}")
    return [f"seed {seed}: {text}" for text in wrong]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_it_finds_the_best_number_and_stays_there(part: int) -> None:
    assert [text for seed in range(part, SEEDS, 4) for text in faults(seed)] == []


@pytest.mark.parametrize(
    ("rules", "seeds"),
    [
        pytest.param({"CPU_FULL": 100.0}, (8, 9), id="no limit by CPUs"),
        pytest.param({"RETRY_ROUNDS": 0, "LATER": 1}, (16, 20, 48), id="no memory of failed growth"),
        pytest.param({"LATER": 1}, (16, 48), id="attempts do not become rarer"),
        pytest.param({"LEAST_GAIN": -math.inf}, (48, 80, 112), id="growth never fails"),
        pytest.param({"BUSY": 1.0, "IDLE_WAITS": 1.0, "SHRINK_TIMES": 1, "PATIENCE": 1}, (27, 31), id="no hysteresis"),
        pytest.param({"SHRINK_TIMES": 1, "PATIENCE": 1, "LATER": 1}, (27, 31, 43), id="no patience"),
        pytest.param({"LEAST_GAIN": 0.6, "SHARE_OF_GAIN": 1.0}, range(8), id="growth mostly fails"),
        pytest.param({"WAITS": 0.3}, range(8), id="waiting is accepted"),
        pytest.param({"MARGIN": 1.0}, (27, 133), id="no margin"),
        pytest.param({"MOST_ROUNDS": 200, "LEAST_ROUNDS": 60}, range(8), id="slow decisions"),
    ],
)
def test_wrong_rules_are_found(rules: dict[str, Any], seeds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rules.items():
        monkeypatch.setattr(growing, name, value)
    assert [text for seed in seeds for text in faults(seed)] != []


def phases(own_s: tuple[float, ...], work_s: tuple[float, ...], steps: int, seed: int) -> Run:
    """Read with a load whose times are others in each phase."""
    draw = np.random.default_rng(seed)
    work = [one for mean_s in work_s for one in times(draw, "lognormal", mean_s, steps)]
    own = [one for mean_s in own_s for one in times(draw, "lognormal", mean_s, steps)]
    return run(Load(work, [0.0] * len(work), own, up_s=0.02), 1, Growing(1, MOST))


@pytest.mark.parametrize("seed", range(8))
def test_phases_in_which_the_trainer_or_the_work_is_slower(seed: int) -> None:
    """Two workers keep up, then eight, then two again, since the trainer is slow."""
    steps = 1_500
    found = phases((0.012, 0.012, 0.08), (0.02, 0.08, 0.08), steps, seed)
    ends = [found.sizes[(number + 1) * steps - 1] for number in range(3)]
    assert 2 <= ends[0] <= 5
    assert 7 <= ends[1] <= 16
    assert 1 <= ends[2] <= 4
    for number, own_s in enumerate((0.012, 0.012, 0.08)):
        assert found.step_s((number + 1) * steps - 500, (number + 1) * steps - 1) < own_s * 1.15
    assert len(found.moves()) < 16


def test_it_is_deterministic() -> None:
    one = case(3)
    assert grown(one).moves() == grown(one).moves() != []
