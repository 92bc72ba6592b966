"""Settings and their grid: what may be tried, what is a step, and which of two is cheaper."""

import pytest

from headrace.tuning.settings import INLINE, Coordinate, Grid, Setting

GRID = Grid(("process", "thread", INLINE), (1, 2, 4), (2, 4), (1, 16))


def test_every_combination_once_the_cheapest_first() -> None:
    settings = GRID.settings()
    assert len(settings) == len(set(settings)) == 2 + 2 * 3 * 2 * 2
    assert settings[0] == Setting(INLINE)
    assert [one.workers for one in settings] == sorted(one.workers for one in settings)


@pytest.mark.parametrize(
    ("cheap", "dear"),
    [
        (Setting("process", 1, 8, 16), Setting("thread", 2, 2, 1)),
        (Setting("process", 1, 8, 1), Setting("process", 1, 2, 4)),
        (Setting("process", 1, 2, 1), Setting("process", 1, 4, 1)),
        (Setting("thread", 1, 2, 1), Setting("process", 1, 2, 1)),
        (Setting(INLINE, 0, 0, 16), Setting("thread", 1, 2, 1)),
        (Setting("process", 2, 2, 1), Setting("ray", 2, 2, 1)),
    ],
)
def test_fewer_workers_are_cheaper_then_fewer_threads_then_less_ahead(cheap: Setting, dear: Setting) -> None:
    assert cheap.cost < dear.cost


@pytest.mark.parametrize(
    ("setting", "name", "up", "expected"),
    [
        (Setting("process", 2, 2, 1), "workers", True, Setting("process", 4, 2, 1)),
        (Setting("process", 3, 2, 1), "workers", True, Setting("process", 4, 2, 1)),
        (Setting("process", 3, 2, 1), "workers", False, Setting("process", 2, 2, 1)),
        (Setting("process", 4, 2, 1), "workers", True, None),
        (Setting("thread", 1, 2, 1), "workers", False, None),
        (Setting("thread", 1, 2, 1), "prefetch_factor", True, Setting("thread", 1, 4, 1)),
        (Setting(INLINE), "workers", True, None),
        (Setting(INLINE), "fetch_threads", True, Setting(INLINE, 0, 0, 16)),
    ],
)
def test_a_step_is_the_next_value(setting: Setting, name: Coordinate, up: bool, expected: Setting | None) -> None:
    assert GRID.step(setting, name, up) == expected


@pytest.mark.parametrize(
    ("setting", "executor", "expected"),
    [
        (Setting("process", 4, 2, 16), "thread", Setting("thread", 4, 2, 16)),
        (Setting("process", 4, 2, 16), INLINE, Setting(INLINE, 0, 0, 16)),
        (Setting(INLINE, 0, 0, 16), "process", Setting("process", 2, 2, 16)),
        (Setting("process", 4, 2, 16), "process", None),
        (Setting("process", 4, 2, 16), "ray", None),
    ],
)
def test_another_executor(setting: Setting, executor: str, expected: Setting | None) -> None:
    assert GRID.on(setting, executor) == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (Setting("process", 2, 4, 16), Setting("process", 2, 4, 16)),
        (Setting("process", 100, 50, 3), Setting("process", 4, 4, 1)),
        (Setting("ray", 2, 2, 1), Setting("thread", 2, 2, 1)),
        (Setting(INLINE, 0, 0, 8), Setting(INLINE, 0, 0, 16)),
    ],
)
def test_the_nearest_setting_keeps_its_executor_where_it_can(setting: Setting, expected: Setting) -> None:
    assert GRID.nearest(setting) == expected


def test_batches_that_have_no_room_in_memory_are_not_asked_for() -> None:
    grid = Grid(("process",), (1, 2, 4), (2, 4), (1,), most_ahead=4)
    assert {one.ahead for one in grid.settings()} == {2, 4}
    assert grid.step(Setting("process", 2, 2), "workers", True) is None
    assert grid.step(Setting("process", 1, 2), "workers", True) == Setting("process", 2, 2)
    smallest = Grid(("process",), (2, 4), (2, 4), (1,), most_ahead=0).settings()
    assert smallest == [Setting("process", 2, 2)]


def test_settings_in_words() -> None:
    assert str(Setting(INLINE, 0, 0, 4)) == "inline, fetch_threads=4"
    assert str(Setting("thread", 2, 8)) == "thread x 2, prefetch_factor=8"
