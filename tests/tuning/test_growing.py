"""How many workers there should be, from given figures: when it grows, when it shrinks, and what it remembers."""

import math
from itertools import pairwise
from typing import Any

import pytest

from headrace.tuning import growing
from headrace.tuning.growing import (
    IDLE_WAITS,
    LATE_S,
    LEAST_ROUNDS,
    MOST_ROUNDS,
    PATIENCE,
    RETRY_ROUNDS,
    SHRINK_ROUNDS,
    SHRINK_TIMES,
    WARM_UP,
    Growing,
)

WORK_S = 0.03


class Trainer:
    """Steps as they would be with the number of workers that is wanted, in constant times.

    Args:
        growing: What decides.
        own_s: The trainer's own time.
        work_s: The work on a batch.
        cpu: The share of that which is CPU time.
        served: How many workers are served at a time; others wait.
    """

    def __init__(
        self, growing: Growing, own_s: float, work_s: float = WORK_S, cpu: float = 0.0, served: float = math.inf
    ) -> None:
        self.growing, self.own_s, self.work_s, self.cpu, self.served = growing, own_s, work_s, cpu, served
        self.sizes = [growing.workers]

    def step(self, up: int | None = None, wait_s: float | None = None, own_s: float | None = None) -> int:
        workers = self.growing.workers
        served = min(workers, self.served)
        own_s = self.own_s if own_s is None else own_s
        if wait_s is None:
            wait_s = max(0.0, self.work_s / served - own_s)
        longer = workers / served if wait_s else 1.0
        wanted = self.growing.note(
            own_s + wait_s, wait_s, self.work_s * longer, self.cpu * self.work_s, workers if up is None else up
        )
        if wanted != self.sizes[-1]:
            self.sizes.append(wanted)
        return wanted

    def run(self, rounds: int, **given: Any) -> list[int]:
        """Go on for so many rounds; return the numbers of workers so far."""
        for _ in range(rounds):
            for _ in range(max(2, self.growing.workers)):
                self.step(**given)
        return self.sizes


def a_trainer(own_s: float, least: int = 1, most: int = 16, **given: Any) -> Trainer:
    load = {name: given.pop(name) for name in ("work_s", "cpu", "served") if name in given}
    return Trainer(Growing(least, most, **given), own_s, **load)


def test_as_many_as_keep_up_and_a_margin() -> None:
    assert a_trainer(0.01).run(60) == [1, 2, 4]  # 30 / 10 = 3 would just keep up; 3 x 1.25 = 3.75
    assert a_trainer(0.007).run(60) == [1, 2, 4, 6]  # 30 / 7 x 1.25 = 5.4
    assert a_trainer(0.0074).run(60) == [1, 2, 4], "waiting for 1 % of the time is no reason"


def test_at_most_twice_as_many_at_a_time() -> None:
    assert a_trainer(1e-6).run(80) == [1, 2, 4, 8, 16]
    assert a_trainer(1e-6, least=3, most=13).run(80) == [3, 6, 12, 13]


def test_where_nothing_is_waited_for_nothing_happens() -> None:
    assert a_trainer(0.04).run(400) == [1]
    assert a_trainer(0.03 * (1 - growing.WAITS) + 1e-4).run(400) == [1]


def test_it_begins_with_few_batches() -> None:
    trainer = a_trainer(0.01)
    trainer.growing.begin(new_workers=True)
    for _ in range(WARM_UP + 2 * LEAST_ROUNDS - 1):
        assert trainer.step() == 1
    assert trainer.step() == 2


def test_cpu_bound_work_stops_at_the_cpus() -> None:
    assert a_trainer(1e-6, cpu=1.0, cpus=3, served=3).run(400) == [1, 2, 3]
    assert a_trainer(1e-6, cpu=0.98, cpus=2, served=2).run(400) == [1, 2]
    assert a_trainer(1e-6, cpu=1.0, cpus=0.5, served=0.5).run(400) == [1]


def test_sleeping_work_may_have_more_workers_than_cpus() -> None:
    assert a_trainer(1e-6, cpu=0.1, cpus=1, served=10).run(400) == [1, 2, 4, 8, 10]
    assert a_trainer(1e-6, cpu=0.01, cpus=1).run(400) == [1, 2, 4, 8, 16]


def test_growing_that_brought_nothing_is_taken_back_and_remembered() -> None:
    """Storage serves two workers at a time. The attempts with four come after ever more rounds."""
    trainer = a_trainer(1e-6, served=2)
    at = []
    for step in range(4000):
        before = trainer.growing.workers
        if trainer.step() > before:
            at.append((step, trainer.growing.workers))
    assert {size for _, size in at} <= {2, 3, 4}
    assert trainer.growing.workers == 2
    attempts = [step for step, size in at if size > 2]
    gaps = [later - earlier for earlier, later in pairwise(attempts)]
    assert 3 <= len(attempts) <= 6
    assert all(later > 2 * earlier for earlier, later in pairwise(gaps)), gaps


def test_what_was_learned_is_forgotten_when_the_load_changes() -> None:
    trainer = a_trainer(1e-6, served=2)
    trainer.run(300)
    assert trainer.growing.workers == 2
    trainer.served, trainer.work_s = math.inf, 2 * WORK_S  # another store, slower but wider
    trainer.run(60)
    assert trainer.growing.workers == 16


def test_fewer_workers_when_the_trainer_gets_slow_and_not_before_it_is_sure() -> None:
    trainer = a_trainer(0.004)
    trainer.run(100)
    assert trainer.growing.workers == 8
    trainer.own_s = 0.1
    trainer.run(SHRINK_ROUNDS * (SHRINK_TIMES - 1))
    assert trainer.growing.workers == 8
    trainer.run(200)
    assert trainer.growing.workers == 1
    assert trainer.sizes[-3:] == [4, 2, 1], "at most by half at a time"


def test_not_below_the_least() -> None:
    trainer = a_trainer(1.0, least=3)
    assert trainer.run(600) == [3]


def test_shrinking_that_was_wrong_is_taken_back_and_makes_patient() -> None:
    """On average two workers are busy; with fewer than six the trainer waits, for what the averages do not show."""
    trainer = a_trainer(0.015, workers=6)
    downs = []
    for number in range(12_000):
        before = trainer.growing.workers
        if trainer.step(wait_s=0.0 if before >= 6 else 0.01) < before:
            downs.append(number)
    gaps = [later - earlier for earlier, later in pairwise(downs)]
    assert 2 <= len(downs) <= 3
    assert trainer.growing.workers == 6
    assert gaps[0] > 6 * SHRINK_ROUNDS * PATIENCE
    assert all(later > 2 * earlier for earlier, later in pairwise(gaps)), gaps


def test_a_long_pause_costs_no_worker() -> None:
    """A checkpoint of a minute every hundred steps."""
    trainer = a_trainer(0.004)
    trainer.run(100)
    for number in range(3000):
        assert trainer.step(own_s=60.0 if number % 100 == 0 else None) == 8


def test_workers_that_are_not_up_are_no_evidence() -> None:
    trainer = a_trainer(0.001)
    trainer.run(20, up=1)
    assert trainer.sizes[:2] == [1, 2]
    for _ in range(1000):
        assert trainer.step(up=1) == 2
    assert trainer.run(60)[-1] == 16


def test_workers_that_do_not_come_up_are_not_waited_for_and_asked_for_again_later() -> None:
    trainer = a_trainer(0.001)
    for _ in range(2000):
        trainer.step(up=min(3, trainer.growing.workers))
        if trainer.growing.workers == 4:
            break
    waited_s = 0.0
    while trainer.growing.workers == 4:
        trainer.step(up=3, wait_s=0.1)
        waited_s += 0.101
    assert trainer.growing.workers == 3
    assert LATE_S <= waited_s < LATE_S + 1
    trainer.run(RETRY_ROUNDS - 1)
    assert trainer.growing.workers == 3
    trainer.run(10)
    assert trainer.growing.workers > 3


def test_no_more_than_there_is_room_for() -> None:
    asked = []

    def fits(more: int) -> int:
        asked.append(more)
        return min(more, 5 - trainer.growing.workers)

    trainer = a_trainer(1e-6, fits=fits)
    assert trainer.run(60) == [1, 2, 4, 5]
    assert asked[:3] == [1, 2, 4]
    asked.clear()
    trainer.run(10 * RETRY_ROUNDS)
    assert len(asked) <= 12, "it is not asked at every step"
    assert trainer.growing.workers == 5


def test_what_the_system_refuses_is_taken_back() -> None:
    trainer = a_trainer(1e-6)
    while trainer.growing.workers == 1:
        trainer.step()
    trainer.growing.refuse()
    assert trainer.growing.workers == 1
    trainer.run(RETRY_ROUNDS - 1)
    assert trainer.growing.workers == 1
    trainer.run(6)
    assert trainer.growing.workers == 2


def test_it_goes_on_from_the_number_that_the_user_chose() -> None:
    trainer = a_trainer(0.01)
    trainer.run(60)
    trainer.growing.go_on_from(12)
    assert trainer.growing.workers == 12
    trainer.run(300)
    assert trainer.sizes[-2:] == [6, 5], "three are busy: with five for 60 % of the time, with four for 75 %"


def test_one_long_batch_is_not_taken_for_a_lack_of_workers() -> None:
    trainer = a_trainer(0.02, workers=2)
    trainer.run(40)
    trainer.step(wait_s=0.1)
    trainer.run(40)
    assert trainer.sizes == [2]


def test_the_beginning_of_a_pass_does_not_count() -> None:
    """Each pass begins with a wait, and has 30 steps."""
    trainer = a_trainer(0.02, workers=2)
    for _ in range(50):
        trainer.growing.begin(new_workers=True)
        trainer.step(wait_s=5.0)
        trainer.run(14)
    assert trainer.sizes == [2]


@pytest.mark.parametrize("waiting", [0.0, IDLE_WAITS, 0.04])
def test_between_the_two_rules_nothing_changes(waiting: float) -> None:
    trainer = a_trainer(0.01 * (1 - waiting), workers=4)
    assert trainer.run(100, wait_s=0.01 * waiting)[-1] == 4
    assert MOST_ROUNDS < 100
