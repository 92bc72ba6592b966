"""The diagnosis: a rule over figures, each line of it once, and the order of the lines."""

from dataclasses import replace

import pytest

from headrace.telemetry.stages import StageTimes
from headrace.tuning.diagnosis import Limit, Machine, blocked_share, diagnose
from headrace.tuning.race import Visit
from headrace.tuning.settings import INLINE, Setting

FOUR = Machine(cpus=4)
PROCESSES, THREADS, ALONE = Setting("process", 2, 2), Setting("thread", 4, 2), Setting(INLINE)


def visit(seconds: float, work_s: float, cpu_s: float, **others: float) -> Visit:
    """A visit whose workers spend all of their time on reading."""
    return replace(Visit(seconds, stages=StageTimes(read_s=work_s, read_cpu_s=cpu_s)), **others)  # type: ignore[arg-type]


COMPUTED_ALONE, STORED_ALONE = visit(0.1, 0.1, 0.1), visit(0.1, 0.1, 0.005)


@pytest.mark.parametrize(
    ("limit", "setting", "seen", "alone"),
    [
        (Limit.STORAGE, PROCESSES, visit(0.05, 0.1, 0.005), STORED_ALONE),
        (Limit.STORAGE, PROCESSES, visit(0.05, 0.1, 0.005), None),
        (Limit.STORAGE, ALONE, STORED_ALONE, STORED_ALONE),
        (Limit.STORAGE, THREADS, visit(0.025, 0.1, 0.005), STORED_ALONE),
        (Limit.CPU, PROCESSES, visit(0.05, 0.1, 0.1), COMPUTED_ALONE),
        (Limit.CPU, Setting("process", 4, 2), visit(0.025, 0.1, 0.1), COMPUTED_ALONE),
        (Limit.CPU, THREADS, visit(0.025, 0.1, 0.1), COMPUTED_ALONE),  # without the GIL: four CPUs
        (Limit.CPU, ALONE, COMPUTED_ALONE, COMPUTED_ALONE),
        (Limit.GIL, THREADS, visit(0.1, 0.4, 0.1), COMPUTED_ALONE),
        (Limit.GIL, THREADS, visit(0.1, 0.4, 0.1), None),
        (Limit.GIL, Setting(INLINE, 0, 0, 8), visit(0.1, 0.1, 0.1), COMPUTED_ALONE),
        (Limit.GIL, Setting("process", 2, 2, 8), visit(0.05, 0.1, 0.1), COMPUTED_ALONE),
        (Limit.GIL, Setting("thread", 8, 2, 16), visit(0.006, 0.1, 0.005), STORED_ALONE),  # as many as the GIL lets
        (Limit.TRANSPORT, PROCESSES, visit(0.02, 0.02, 0.02, transport_s=0.015), COMPUTED_ALONE),
        (Limit.TRANSPORT, PROCESSES, visit(0.02, 0.02, 0.02, rank_cpu_s=0.015), COMPUTED_ALONE),
        (
            Limit.TRANSPORT,
            PROCESSES,
            Visit(0.05, stages=StageTimes(read_s=0.04, read_cpu_s=0.04, encode_s=0.06, encode_cpu_s=0.06)),
            COMPUTED_ALONE,
        ),
    ],
)
def test_each_line(limit: Limit, setting: Setting, seen: Visit, alone: Visit | None) -> None:
    found = diagnose(setting, seen, FOUR, alone)
    assert found.limit is limit, found.why
    assert found.why
    assert found.advice


@pytest.mark.parametrize(
    ("limit", "seen"),
    [
        (Limit.TRAINER, visit(0.1, 0.15, 0.15, wait_s=0.001)),
        (Limit.UNEVEN, visit(0.1, 0.1, 0.1, wait_s=0.02)),
        (Limit.CPU, visit(0.1, 0.2, 0.2, wait_s=0.02)),
    ],
)
def test_beside_a_trainer(limit: Limit, seen: Visit) -> None:
    assert diagnose(PROCESSES, seen, Machine(4, step_s=0.08), COMPUTED_ALONE).limit is limit
    assert diagnose(PROCESSES, seen, FOUR, COMPUTED_ALONE).limit is Limit.CPU


def test_with_one_cpu_the_gil_is_nobodys_limit() -> None:
    seen = visit(0.1, 0.4, 0.1)
    assert diagnose(THREADS, seen, Machine(1), COMPUTED_ALONE).limit is Limit.CPU


def test_threads_that_get_more_of_a_crowded_machine_than_one_are_not_held_by_the_gil() -> None:
    """One thread gets a quarter of a CPU; four together get a quarter with the GIL, and 0.8 without it."""
    alone = visit(0.4, 0.4, 0.1, queue_s=0.3)
    assert diagnose(THREADS, visit(0.4, 1.6, 0.1), FOUR, alone).limit is Limit.GIL
    assert diagnose(THREADS, visit(0.125, 0.5, 0.1), FOUR, alone).limit is Limit.CPU


def test_threads_that_sleep_on_a_crowded_machine_are_not_held_by_the_gil() -> None:
    """Each wakes and waits for a CPU, so that one alone would have a fifth of one while it computes."""
    alone = visit(0.1, 0.1, 0.003, queue_s=0.012)
    assert diagnose(Setting("process", 4, 2, 16), visit(0.008, 0.1, 0.004), FOUR, alone).limit is Limit.STORAGE


def test_waiting_for_a_cpu_that_others_use_is_no_storage() -> None:
    crowded = visit(0.1, 0.1, 0.03, queue_s=0.07)
    assert blocked_share(crowded) == pytest.approx(0.0)
    found = diagnose(ALONE, crowded, FOUR, crowded)
    assert found.limit is Limit.CPU
    assert "a batch alone waited 70% of its time for one" in found.why
    assert "waited" not in diagnose(ALONE, COMPUTED_ALONE, FOUR, COMPUTED_ALONE).why


def test_where_nothing_is_loaded_ahead_it_says_so() -> None:
    assert "nothing is loaded ahead" in diagnose(ALONE, STORED_ALONE, FOUR, STORED_ALONE).why
    assert "ahead" not in diagnose(PROCESSES, visit(0.05, 0.1, 0.005), FOUR, STORED_ALONE).why


def test_inline_where_workers_are_slower_the_handover_is_the_limit() -> None:
    quick, queued = visit(2e-3, 2e-3, 2e-3), visit(2e-3, 4e-3, 2e-3, queue_s=2e-3)
    found = diagnose(ALONE, quick, FOUR, quick, with_workers_s=4e-3)
    assert found.limit is Limit.HANDOVER
    assert "with workers a step takes 2.00 times as long" in found.why
    assert "More workers do not help" in found.advice
    assert diagnose(ALONE, quick, FOUR, quick).limit is Limit.CPU, "no workers were tried"
    assert diagnose(ALONE, quick, FOUR, quick, with_workers_s=2e-3).limit is Limit.CPU, "they are as fast"
    assert diagnose(ALONE, quick, Machine(1), quick, with_workers_s=4e-3).limit is Limit.CPU, "there is one CPU"
    assert diagnose(ALONE, quick, FOUR, queued, with_workers_s=4e-3).limit is Limit.CPU, "others use the CPUs"
    quickest = visit(1e-4, 1e-4, 1e-4)
    assert diagnose(ALONE, quickest, Machine(1), queued, with_workers_s=2e-4).limit is Limit.HANDOVER


def test_a_loader_that_takes_no_time_has_a_limit_all_the_same() -> None:
    assert diagnose(ALONE, Visit(1e-6), FOUR).limit is Limit.CPU
    assert diagnose(PROCESSES, Visit(1e-6), FOUR, Visit(1e-6)).limit is Limit.CPU
