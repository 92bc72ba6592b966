"""The last rounds: who is in them, what they decide, and when they end."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from headrace.tuning.diagnosis import Machine
from headrace.tuning.finals import FINALISTS, LEAST_ROUNDS, MOST_ROUNDS, Finals, finalists
from headrace.tuning.race import TOLERANCE, Visit
from headrace.tuning.search import Limits, Result, Search, SettingFailed
from headrace.tuning.settings import INLINE, Grid, Setting
from tuning.virtual import GRID, Load, Virtual

ALONE, THREAD, PROCESS = Setting(INLINE), Setting("thread", 2, 2), Setting("process", 2, 2)
PROCESSES = Setting("process", 4, 2)


def finals(**seconds: Sequence[float]) -> Finals:
    """Rounds in which settings took these seconds: `alone`, `thread`, `process`."""
    settings = {"alone": ALONE, "thread": THREAD, "process": PROCESS}
    rounds = [
        {settings[name]: Visit(one) for name, one in zip(seconds, found, strict=True)}
        for found in zip(*seconds.values(), strict=True)
    ]
    return Finals([settings[name] for name in seconds], 0.04, rounds)


def test_the_finalists_are_the_choice_the_fastest_and_one_of_each_other_executor() -> None:
    means = {PROCESS: 1.0, PROCESSES: 0.98, THREAD: 1.2, Setting("thread", 4, 2): 1.1, ALONE: 1.05}
    assert finalists(PROCESS, PROCESSES, means)[:2] == [PROCESS, PROCESSES]
    assert finalists(PROCESSES, PROCESSES, means) == [PROCESSES, ALONE, Setting("thread", 4, 2)]


def test_the_runner_up_is_a_finalist_where_there_is_room() -> None:
    means = {PROCESS: 1.0, PROCESSES: 1.02, Setting("process", 8, 2): 1.01, THREAD: 1.3}
    assert finalists(PROCESS, PROCESS, means) == [PROCESS, THREAD, Setting("process", 8, 2)]
    assert FINALISTS == 3


def test_settings_that_were_much_slower_are_no_finalists() -> None:
    assert finalists(PROCESS, PROCESS, {PROCESS: 1.0, THREAD: 1.5, ALONE: 2.0, PROCESSES: 1.6}) == [PROCESS]


def test_rounds_go_through_all_orders() -> None:
    found = finals(alone=[1.0] * MOST_ROUNDS, thread=[1.0] * MOST_ROUNDS, process=[1.0] * MOST_ROUNDS)
    orders = Counter(tuple(Finals(found.settings, 0.0, found.rounds[:count]).order()) for count in range(MOST_ROUNDS))
    assert len(orders) == 6
    assert set(orders.values()) == {MOST_ROUNDS // 6}


def test_slow_visits_count() -> None:
    found = finals(alone=[1.0, 1.0, 1.0, 2.7] * 2, process=[1.1] * 8)
    assert found.fastest() == found.choice() == PROCESS
    bounds = found.bounds(ALONE)
    assert bounds.mean == pytest.approx(5.7 / 4)
    assert bounds.low < bounds.mean < bounds.high
    assert bounds.high / bounds.mean > found.bounds(PROCESS).high / found.bounds(PROCESS).mean


@pytest.mark.parametrize(("share", "expected"), [(0.5, ALONE), (1.5, PROCESS)])
def test_of_equal_ones_the_cheapest_is_the_choice(share: float, expected: Setting) -> None:
    found = finals(alone=[1 + share * TOLERANCE] * 4, process=[1.0] * 4, thread=[1.0] * 4)
    assert found.fastest() == PROCESS
    assert found.choice() == (ALONE if expected == ALONE else THREAD)
    without_threads = finals(process=[1.0] * 4, alone=[1 + share * TOLERANCE] * 4)
    assert without_threads.choice() == expected


@pytest.mark.parametrize(
    ("alone", "process", "over"),
    [(1.2, 1.0, True), (1.0, 1.0, False), (1.0, 1.2, True), (1.02, 1.0, False), (1.04, 1.0, False), (1.0, 0.98, False)],
)
def test_they_end_when_the_others_are_out(alone: float, process: float, over: bool) -> None:
    assert finals(alone=[alone] * LEAST_ROUNDS, process=[process] * LEAST_ROUNDS).over is over
    assert not finals(alone=[alone] * (LEAST_ROUNDS - 1), process=[process] * (LEAST_ROUNDS - 1)).over
    assert finals(alone=[alone] * MOST_ROUNDS, process=[process] * MOST_ROUNDS).over


def test_one_that_costs_more_must_be_faster_by_more_than_the_tolerance() -> None:
    assert finals(alone=[1.0] * (MOST_ROUNDS - 1), process=[1.0] * (MOST_ROUNDS - 1)).over
    assert not finals(alone=[1.0] * LEAST_ROUNDS, process=[1.0] * LEAST_ROUNDS).over


def test_one_that_costs_less_is_compared_with_the_fastest_even_if_another_is_the_choice() -> None:
    found = finals(alone=[1.0304] * 11, thread=[1.0296] * 11, process=[1.0] * 11)
    found.sigma = 0.002
    assert (found.choice(), found.fastest()) == (THREAD, PROCESS)
    assert found.over
    found.sigma = 0.02
    assert not found.over


def test_a_change_of_the_machines_load_in_both_is_no_difference() -> None:
    loads = np.array([1.0, 3.0, 3.0, 1.0, 1.0, 3.0])
    steady, changing = finals(alone=[1.0] * 6, process=[1.1] * 6), finals(alone=loads, process=1.1 * loads)
    assert changing.difference(PROCESS, ALONE)[0] == pytest.approx(0.1)
    assert changing.difference(PROCESS, ALONE)[1] == pytest.approx(steady.difference(PROCESS, ALONE)[1], rel=0.3)
    apart = finals(alone=loads, process=1.1 * loads[::-1])
    assert apart.difference(PROCESS, ALONE)[1] > 5 * steady.difference(PROCESS, ALONE)[1]


def test_one_that_failed_is_out_of_all_rounds() -> None:
    found = finals(alone=[1.0] * 4, process=[0.9] * 4, thread=[1.1] * 4)
    found.drop(PROCESS)
    assert found.fastest() == ALONE
    assert set(found.order()) == {ALONE, THREAD}
    found.drop(ALONE)
    assert found.over
    assert found.choice() == THREAD


@dataclass
class Copied(Virtual):
    """Copies large samples: the trainer's own thread is the fastest, in its fast mode, since workers must hand over."""

    fails: Callable[[int, Setting], bool] = lambda visits, setting: False

    def steady_s(self, setting: Setting, slower: float = 1.0) -> float:
        handing = {INLINE: 1.0, "process": 1.08 if setting.workers > 1 else 1.5, "thread": 1.3}
        return super().steady_s(setting, slower) * handing[setting.executor]

    def __call__(self, setting: Setting, limits: Limits) -> Visit:
        if self.fails(len(self.visited), setting):
            raise SettingFailed("no memory left")
        return super().__call__(setting, limits)


COPIED = Load(python_s=0.02, transport_s=0.02)


def inline_is_slow_in(share: float) -> Callable[[Setting], tuple[float, float]]:
    return lambda setting: (share * (setting.executor == INLINE), 2.7)


def searched(virtual: Virtual, start: Setting = PROCESS, seconds: float = 60.0) -> Result:
    return Search(GRID, virtual, virtual.clock, Machine(virtual.cpus, virtual.step_s), seconds).run(start)


def rounds(result: Result) -> dict[Setting, int]:
    return {entry.setting: entry.rounds for entry in result.entries if entry.rounds}


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_a_setting_that_is_slow_in_some_visits_is_not_chosen_for_its_fast_ones(share: float) -> None:
    good = 0
    for seed in range(24):
        virtual = Copied(COPIED, sigma=0.04, rugged=0.03, seed=seed, modes=inline_is_slow_in(share))
        choice = searched(virtual).choice
        good += virtual.mean_s(choice) <= 1.1 * min(map(virtual.mean_s, GRID.settings()))
    assert good >= 18


def test_without_slow_visits_the_same_setting_is_right() -> None:
    for seed in range(12):
        virtual = Copied(COPIED, sigma=0.04, seed=seed)
        assert searched(virtual).choice.executor == INLINE


def test_figures_are_those_of_the_last_rounds() -> None:
    virtual = Copied(COPIED, sigma=0.04, seed=11, modes=inline_is_slow_in(0.5))
    seen: list[tuple[Setting, Visit]] = []
    told = Search(GRID, virtual, virtual.clock, Machine(4), 60.0, seen=lambda *visited: seen.append(visited))
    result = told.run(PROCESS)
    found = rounds(result)
    assert {setting.executor for setting in found} == {INLINE, "process", "thread"}
    assert result.entries[0].setting == result.fastest
    for place, entry in enumerate(result.entries):
        assert bool(entry.rounds) is (place < len(found))
        if entry.rounds:
            seconds = [visit.seconds for setting, visit in seen[-sum(found.values()) :] if setting == entry.setting]
            assert entry.bounds
            assert entry.bounds.mean == pytest.approx(sum(seconds) / entry.rounds)
    assert sum(entry.visits for entry in result.entries) == len(virtual.visited) - 1  # a batch alone


def test_they_end_early_where_all_is_clear() -> None:
    result = searched(Copied(COPIED, cpus=4))
    assert set(rounds(result).values()) == {LEAST_ROUNDS}
    noisy = [searched(Copied(COPIED, cpus=4, sigma=0.15, seed=seed)) for seed in range(6)]
    assert max(max(rounds(one).values(), default=0) for one in noisy) == MOST_ROUNDS


def test_there_are_none_where_the_trainer_never_waits() -> None:
    result = searched(Virtual(Load(python_s=0.06), step_s=0.07, sigma=0.02))
    assert result.choice.workers == 1
    assert len(result.entries) > 1
    assert not rounds(result)


def test_there_are_none_with_one_finalist() -> None:
    virtual = Virtual(Load(python_s=0.06), cpus=4)
    grid = Grid(("process",), (1, 2), (2,))
    result = Search(grid, virtual, virtual.clock, Machine(4), 60.0).run(Setting("process", 1, 2))
    assert result.choice == PROCESS
    assert result.complete
    assert len(result.entries) == 2
    assert not rounds(result)


def test_the_time_is_kept_and_no_rounds_begin_where_it_is_too_short() -> None:
    ends = set()
    for seconds in range(8, 40):
        virtual = Copied(COPIED, sigma=0.04, seed=5, modes=inline_is_slow_in(0.5))
        result = searched(virtual, seconds=seconds)
        assert virtual.now_s <= seconds
        found = set(rounds(result).values())
        assert len(found) <= 1
        assert found <= set(range(LEAST_ROUNDS, MOST_ROUNDS + 1))
        ends.add((bool(found), result.complete, virtual.now_s < seconds))
    assert (False, False, True) in ends  # none
    assert (True, False, False) in ends  # some
    assert (True, True, True) in ends  # as many as are needed


def test_too_few_rounds_decide_nothing() -> None:
    """The machine becomes slow when they have begun, so that there is time for three."""
    whole = Copied(COPIED, sigma=0.04, seed=5, modes=inline_is_slow_in(0.5))
    last = sum(rounds(searched(whole)).values())
    first = len(whole.visited) - last
    virtual = Copied(COPIED, sigma=0.04, seed=5, modes=inline_is_slow_in(0.5))
    virtual.change = lambda now_s: 1.0 if len(virtual.visited) <= first else 20.0
    result = searched(virtual)
    assert len(virtual.visited) > first + 3 * FINALISTS
    assert virtual.now_s <= 60.0
    assert not result.complete
    assert not rounds(result)
    assert result.choice == virtual.visited[first]  # the choice before is visited first
    assert all(entry.bounds and entry.bounds.mean < 0.1 for entry in result.entries)


@pytest.mark.parametrize("number", range(FINALISTS))
def test_a_finalist_that_fails_in_the_last_rounds_is_out(number: int) -> None:
    whole = Copied(COPIED, sigma=0.04, seed=11, modes=inline_is_slow_in(0.5))
    last = sum(rounds(searched(whole)).values())
    assert last >= FINALISTS * LEAST_ROUNDS
    place = len(whole.visited) - last + FINALISTS + number  # in the second of the last rounds
    broken = whole.visited[place]
    virtual = Copied(COPIED, sigma=0.04, seed=11, modes=inline_is_slow_in(0.5))
    virtual.fails = lambda visits, setting: visits >= place and setting == broken
    result = searched(virtual)
    assert broken not in (result.choice, result.fastest)
    (entry,) = [one for one in result.entries if one.setting == broken]
    assert (entry.failed, entry.bounds, entry.last) == ("no memory left", None, None)
    assert len(rounds(result)) == FINALISTS - 1
    assert sum(one.visits for one in result.entries) == len(virtual.visited) - 1


@pytest.mark.parametrize("whole_rounds", [0, LEAST_ROUNDS])
def test_the_last_finalist_that_does_not_fail_is_the_choice(whole_rounds: int) -> None:
    whole = Copied(COPIED, sigma=0.04, seed=11, modes=inline_is_slow_in(0.5))
    found = rounds(searched(whole))
    first = len(whole.visited) - sum(found.values()) + whole_rounds * len(found)
    for left in found:
        virtual = Copied(COPIED, sigma=0.04, seed=11, modes=inline_is_slow_in(0.5))
        virtual.fails = lambda visits, setting, left=left: visits >= first and setting != left
        result = searched(virtual)
        assert result.choice == result.fastest == left
        assert rounds(result) == ({left: whole_rounds} if whole_rounds else {})
        assert {entry.setting for entry in result.entries if entry.failed} == {*found} - {left}
