"""What is tried next: the most promising neighbours first, none that cannot win, and what is cheaper."""

import pytest

from headrace.telemetry.stages import StageTimes
from headrace.tuning.diagnosis import Limit, Machine
from headrace.tuning.moves import Ideal, cheaper, moves
from headrace.tuning.race import Visit
from headrace.tuning.settings import INLINE, Grid, Setting

GRID = Grid(("process", "thread", INLINE), (1, 2, 4), (2, 4), (1, 4, 16))
MIDDLE = Setting("process", 2, 2, 4)


@pytest.mark.parametrize(
    ("limit", "first"),
    [
        (Limit.STORAGE, Setting("process", 2, 2, 16)),
        (Limit.CPU, Setting("process", 4, 2, 4)),
        (Limit.GIL, Setting("thread", 2, 2, 4)),
        (Limit.TRANSPORT, Setting("thread", 2, 2, 4)),
        (Limit.UNEVEN, Setting("process", 2, 4, 4)),
    ],
)
def test_the_diagnosis_says_what_is_tried_first(limit: Limit, first: Setting) -> None:
    assert moves(MIDDLE, GRID, limit)[0] == first


@pytest.mark.parametrize("limit", list(Limit))
def test_all_neighbours_are_tried_in_the_end(limit: Limit) -> None:
    found = moves(MIDDLE, GRID, limit)
    assert len(found) == len(set(found))
    neighbours = {(4, 2, 4), (1, 2, 4), (2, 4, 4), (2, 2, 16), (2, 2, 1)}
    assert {(one.workers, one.prefetch_factor, one.fetch_threads) for one in found if one.executor == "process"} == (
        neighbours
    )
    assert {one for one in found if one.executor == "thread"} == {
        Setting("thread", 2, 2, 4),
        Setting("thread", 4, 2, 4),
    }
    assert Setting(INLINE, 0, 0, 4) in found


def test_from_the_trainers_thread_workers_come_first() -> None:
    assert moves(Setting(INLINE), GRID, Limit.STORAGE)[:2] == [Setting("process", 2, 2), Setting("thread", 2, 2)]


def test_one_worker_thread_leads_to_two_processes() -> None:
    """With the GIL neither a second thread helps nor a process in the place of the thread, but both together do."""
    assert Setting("process", 2, 2) in moves(Setting("thread", 1, 2), GRID, Limit.GIL)


def test_cheaper_settings_have_fewer_workers_first() -> None:
    found = cheaper(Setting("process", 4, 4, 4), GRID)
    assert all(one.cost < Setting("process", 4, 4, 4).cost for one in found)
    assert [one.workers for one in found] == sorted(one.workers for one in found)
    assert {
        Setting(INLINE, 0, 0, 4),
        Setting("process", 2, 4, 4),
        Setting("process", 2, 4, 16),
        Setting("thread", 2, 4, 4),
        Setting("process", 4, 2, 4),
        Setting("process", 4, 4, 1),
    } <= set(found)
    assert cheaper(Setting(INLINE), GRID) == []


def test_what_cannot_win_even_if_it_scaled_ideally_is_left_out() -> None:
    ideal = Ideal(Machine(cpus=2))
    ideal.see(Setting(INLINE), Visit(0.3, stages=StageTimes(read_s=0.3, read_cpu_s=0.02)))
    assert ideal.seconds(Setting(INLINE)) == pytest.approx(0.3)
    assert ideal.seconds(Setting("thread", 2, 2, 4)) == pytest.approx(0.3 / 8)
    assert ideal.seconds(Setting("process", 4, 2, 16)) == pytest.approx(0.02 / 2)
    assert ideal.seconds(Setting("ray", 4, 2, 16)) == pytest.approx(0.3 / 64)
    assert ideal.can_win(GRID.settings(), 0.02) == [
        one for one in GRID.settings() if max(1, one.workers) * one.fetch_threads >= 16
    ]


def test_the_least_that_was_seen_counts_and_only_of_one_sample_at_a_time() -> None:
    ideal = Ideal(Machine(cpus=2))
    for setting, read_s in (
        (Setting(INLINE), 0.3),
        (Setting("process", 1, 2), 0.2),
        (Setting("thread", 1, 2, 4), 0.05),
    ):
        ideal.see(setting, Visit(read_s, stages=StageTimes(read_s=read_s, read_cpu_s=0.0)))
    assert ideal.seconds(Setting("process", 1, 2)) == pytest.approx(0.2)


def test_beside_a_step_no_setting_is_faster_than_the_step() -> None:
    ideal = Ideal(Machine(cpus=2, step_s=0.1))
    ideal.see(Setting(INLINE), Visit(0.3, stages=StageTimes(read_s=0.2, read_cpu_s=0.02)))
    assert ideal.seconds(Setting(INLINE)) == pytest.approx(0.3)
    assert ideal.seconds(Setting("process", 4, 2)) == pytest.approx(0.1)
    assert ideal.seconds(Setting("process", 1, 2)) == pytest.approx(0.2)
