"""The search: along one coordinate after another to the fastest setting, then to the cheapest as fast; then the finals.

1. A setting that fetches one sample at a time in the trainer's thread is visited once: its stage times say how fast any
   setting can be at best (`moves.Ideal`). Settings that cannot win even so are left out.
2. The neighbours of the best setting are raced against it (`race`), in an order that the diagnosis of its stage times
   gives (`diagnosis`). The first that is faster takes its place, and the next step in its direction is tried first.
   That ends when no neighbour is faster, or the trainer never waits.
3. Cheaper neighbours are raced for equality with the fastest setting: fewer workers first, then fewer threads, then
   fewer batches ahead. Each that is equal is the choice from then on.
4. The choice, the fastest, and a few others that were nearly as fast are visited again in rounds, and only these visits
   decide between them (`finals`). Where the trainer never waits there is nothing to decide.

It ends there, or when the time is over.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headrace.tuning.diagnosis import Diagnosis, Limit, Machine, diagnose
from headrace.tuning.finals import LEAST_ROUNDS, Finals, finalists
from headrace.tuning.moves import Ideal, cheaper, moves
from headrace.tuning.race import (
    MOST_VISITS,
    TOLERANCE,
    Bounds,
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
from headrace.tuning.settings import COORDINATES, INLINE, Grid, Setting

_FASTER_SHARE, _CHEAPER_SHARE = 0.75, 0.85
"""The shares of the time after which no faster and no cheaper setting is looked for, so that there is time left."""

_VISIT = 0.2
"""The largest share of the time that one visit may take."""

_CUT_ABOVE = 3.0
"""How many times slower than the best a setting may be without that its measurement is cut short."""


class SettingFailed(Exception):
    """A setting cannot be measured; the text says why."""


class TimeIsOver(Exception):
    """A measurement could not be taken before the deadline."""


class Limits(NamedTuple):
    """When a measurement ends.

    Attributes:
        deadline_s: The clock's time by which it must have ended.
        cut_above_s: Seconds per step above which it may be cut short; infinity without a limit.
    """

    deadline_s: float
    cut_above_s: float = float("inf")


Measure = Callable[[Setting, Limits], Visit]
"""Visits a setting; raises `SettingFailed`, or `TimeIsOver`."""


@dataclass(frozen=True)
class Entry:
    """A setting that was tried.

    Attributes:
        setting: The setting.
        visits: How often it was measured.
        bounds: Its seconds per step; None if it failed. A finalist's are those of the last rounds.
        last: What was measured last; None if it failed.
        failed: Why it could not be measured; "" if it could.
        rounds: How many last rounds its seconds are from; 0 if it was no finalist, or there were too few rounds.
    """

    setting: Setting
    visits: int
    bounds: Bounds | None
    last: Visit | None
    failed: str = ""
    rounds: int = 0


@dataclass(frozen=True)
class Result:
    """What a search has found.

    Attributes:
        choice: The setting to use.
        fastest: The fastest setting, of the finalists if there were any; not the choice where a cheaper one is as fast.
        start: The setting that the search began with.
        speedup: How many times faster a step is with the choice than with the start.
        entries: The settings that were tried: the finalists, the others, those that failed; of each the fastest first.
        diagnosis: What limits the choice.
        ruled_out: How many settings of the grid could not win even if they scaled ideally.
        untried: How many others were not tried.
        complete: Whether the search has ended by itself, rather than with the time.
    """

    choice: Setting
    fastest: Setting
    start: Setting
    speedup: float
    entries: Sequence[Entry]
    diagnosis: Diagnosis
    ruled_out: int
    untried: int
    complete: bool


@dataclass
class Search:
    """One search.

    Attributes:
        grid: The settings that may be tried. Its `most_ahead` is set when a batch's size is known.
        measure: Visits a setting.
        clock: Returns the time, in seconds.
        machine: The CPUs, and the training step.
        seconds: How long the search may take.
        spare_bytes: The memory that batches may take; None without a limit.
        seen: Called after each visit.
    """

    grid: Grid
    measure: Measure
    clock: Callable[[], float]
    machine: Machine
    seconds: float
    spare_bytes: int | None = None
    seen: Callable[[Setting, Visit], None] | None = None
    _visits: dict[Setting, list[Numbered]] = field(default_factory=dict)
    _all: dict[Setting, list[Visit]] = field(default_factory=dict)
    _took_s: dict[Setting, float] = field(default_factory=dict)
    _failed: dict[Setting, str] = field(default_factory=dict)
    _finals: Finals = field(default_factory=Finals)
    _alone: Visit | None = None
    _taken: int = 0
    _complete: bool = True

    def run(self, start: Setting) -> Result:
        """Search from a setting on.

        Raises:
            SettingFailed: The start cannot be measured.
        """
        self._ideal, self._began_s = Ideal(self.machine), self.clock()
        self._over_s = self._began_s + self.seconds
        self._visit_alone()
        self._best = start
        self._take(start)
        with suppress(TimeIsOver):
            self._find_faster()
        self._choice = self._best
        with suppress(TimeIsOver):
            self._find_cheaper()
        with suppress(TimeIsOver):
            self._run_finals()
        return self._result(start)

    def _visit_alone(self) -> None:
        """Visit the setting that shows a batch's work undisturbed.

        It is the first visit of all, and pays for what is read and imported first. It is compared with no other.
        """
        alone = Setting(INLINE)
        try:
            visit = self.measure(alone, Limits(self._until()))
        except (SettingFailed, TimeIsOver):  # if only workers can read the dataset, or soon enough
            return
        self._alone = visit
        self._ideal.see(alone, visit)
        self._note(alone, visit)

    def _until(self) -> float:
        """Return when a visit that begins now has to end: no visit may take all of the time."""
        return min(self._over_s, self.clock() + _VISIT * self.seconds)

    def _note(self, setting: Setting, visit: Visit) -> None:
        """Tell of a visit, and keep settings from being tried whose batches have no room in memory."""
        self._taken += 1
        if self.spare_bytes is not None and visit.batch_bytes:
            self.grid = replace(self.grid, most_ahead=self.spare_bytes // visit.batch_bytes)
        if self.seen is not None:
            self.seen(setting, visit)

    def _take(self, setting: Setting) -> None:
        """Visit a setting to compare it with the best."""
        best = self._visits.get(self._best)
        cut_above_s = _CUT_ABOVE * self._bounds(self._best).mean if best and setting != self._best else float("inf")
        number = self._taken
        visit = self._visit(setting, Limits(self._until(), cut_above_s))
        self._visits.setdefault(setting, []).append(Numbered(number, visit))

    def _visit(self, setting: Setting, limits: Limits) -> Visit:
        """Visit a setting."""
        began_s = self.clock()
        try:
            if began_s >= self._over_s:
                raise TimeIsOver
            visit = self.measure(setting, limits)
        except SettingFailed as error:
            self._failed[setting] = str(error)
            raise
        except TimeIsOver as error:
            if self._visits and self.clock() >= self._over_s:
                raise
            took_s = self.clock() - self._began_s
            self._failed[setting] = f"too few batches came within {took_s:.0f} s: give the search more --seconds"
            raise SettingFailed(self._failed[setting]) from error
        self._all.setdefault(setting, []).append(visit)
        self._took_s[setting] = self.clock() - began_s
        self._ideal.see(setting, visit)
        self._note(setting, visit)
        return visit

    def _bounds(self, setting: Setting) -> Bounds:
        if self._rounds(setting):
            return self._finals.bounds(setting)
        return bounds(self._visits[setting], noise(self._visits))

    def _diagnosis(self, setting: Setting, with_workers_s: float = 0.0) -> Diagnosis:
        again = self._all.get(Setting(INLINE))
        alone = again[-1] if again else self._alone
        return diagnose(setting, self._all[setting][-1], self.machine, alone, with_workers_s)

    def _fed(self, setting: Setting) -> bool:
        """Tell whether the trainer never waits."""
        return self._diagnosis(setting).limit is Limit.TRAINER

    def _next(self, candidates: Sequence[Setting], tried: set[Setting]) -> Setting | None:
        """Return the first candidate that may win, has not failed, and was not tried against the present best."""
        may_win = self._ideal.can_win(candidates, self._bounds(self._best).high)
        return next((one for one in may_win if one not in tried and one not in self._failed), None)

    def _find_faster(self) -> None:
        """Move to faster settings until no neighbour is faster."""
        ahead: list[Setting] = []
        tried: set[Setting] = set()
        until_s = self._began_s + _FASTER_SHARE * self.seconds
        while not self._fed(self._best):
            if self.clock() >= until_s:
                self._complete = False
                return
            neighbours = moves(self._best, self.grid, self._diagnosis(self._best).limit)
            challenger = self._next([*ahead, *neighbours], tried)
            if challenger is None:
                return
            tried.add(challenger)
            ahead = []
            if self._races(challenger, self._beats):
                ahead = self._further(self._best, challenger)
                tried.add(self._best)
                self._best = challenger

    def _further(self, before: Setting, now: Setting) -> list[Setting]:
        """Return the next step in the direction of the last one."""
        changed = [name for name in COORDINATES if getattr(before, name) != getattr(now, name)]
        if before.executor != now.executor or not changed:
            return []
        further = [self.grid.step(now, name, getattr(now, name) > getattr(before, name)) for name in changed]
        return [one for one in further if one is not None]

    def _find_cheaper(self) -> None:
        """Move to cheaper settings that are as fast as the best."""
        tried: set[Setting] = set()
        until_s = self._began_s + _CHEAPER_SHARE * self.seconds
        while (candidate := self._next(cheaper(self._choice, self.grid), tried)) is not None:
            if self.clock() >= until_s:
                self._complete = False
                return
            tried.add(candidate)
            if self._races(candidate, self._equals):
                self._choice = candidate
                if self._bounds(candidate).mean < self._bounds(self._best).mean:
                    self._best = candidate

    def _run_finals(self) -> None:
        """Visit the finalists in rounds, if there is time for enough, and let these visits decide."""
        if self._fed(self._choice):
            return
        means = {one: self._bounds(one).mean for one in self._measured()}
        finals = Finals(finalists(self._choice, self._best, means), noise(self._visits))
        least_s = LEAST_ROUNDS * sum(self._took_s[one] for one in finals.settings)
        if not finals.over and self.clock() + least_s > self._over_s:
            self._complete = False
            return
        try:
            while not finals.over:
                self._run_round(finals)
        finally:
            self._finals = finals
            if finals.enough:
                self._choice, self._best = finals.choice(), finals.fastest()
            else:
                left = finals.settings
                self._choice, self._best = (one if one in left else left[0] for one in (self._choice, self._best))

    def _run_round(self, finals: Finals) -> None:
        """Visit each finalist once, and drop those that fail. Of a round that time ends nothing counts."""
        found: dict[Setting, Visit] = {}
        for setting in finals.order():
            if len(finals.settings) > 1:
                try:
                    found[setting] = self._visit(setting, Limits(self._over_s))
                except SettingFailed:
                    finals.drop(setting)
        if len(finals.settings) > 1:
            finals.rounds.append(found)

    def _races(self, challenger: Setting, decides: Callable[[Setting, int], bool | None]) -> bool:
        """Visit a challenger and the best in turn until it is decided."""
        mine = self._visits.setdefault(challenger, [])
        best = self._visits[self._best]
        try:
            while True:
                visits, others = len(near(mine, best)), len(near(best, mine))
                if visits and others:
                    decided = decides(challenger, min(visits, others))
                    if decided is not None:
                        return decided
                # The one with fewer visits near the other's is next; of equals, the one visited longer ago.
                turns = {
                    one: (count, found[-1].number if found else -1)
                    for one, count, found in ((challenger, visits, mine), (self._best, others, best))
                }
                self._take(min(turns, key=turns.__getitem__))
        except SettingFailed:
            if challenger not in self._failed:
                raise
            return False

    def _beats(self, challenger: Setting, visits: int) -> bool | None:
        mine, best, sigma = self._visits[challenger], self._visits[self._best], noise(self._visits)
        verdict = compare(mine, best, sigma, last=visits >= MOST_VISITS)
        return None if verdict is Verdict.OPEN else verdict is Verdict.FASTER

    def _equals(self, challenger: Setting, visits: int) -> bool | None:
        mine, best, sigma = self._visits[challenger], self._visits[self._best], noise(self._visits)
        if len(mine) > 1 and self._fed(self._best) and self._fed(challenger):
            return True
        # In noise, twice as many: to take a slower setting for an equal one costs more than to miss a faster one.
        most = MOST_VISITS if gain(mine, best, sigma)[1] <= TOLERANCE else 2 * MOST_VISITS
        return equal(mine, best, sigma, last=visits >= most)

    def _measured(self) -> list[Setting]:
        """Return the settings that were measured, and never failed."""
        return [one for one, found in self._visits.items() if found and one not in self._failed]

    def _rounds(self, setting: Setting) -> int:
        """Return how many last rounds count for a setting."""
        return len(self._finals.rounds) if self._finals.enough and setting in self._finals.settings else 0

    def _result(self, start: Setting) -> Result:
        measured = sorted(self._measured(), key=lambda one: (not self._rounds(one), self._bounds(one).mean))
        entries = [
            Entry(one, len(self._all[one]), self._bounds(one), self._all[one][-1], rounds=self._rounds(one))
            for one in measured
        ]
        entries += [Entry(one, len(self._all.get(one, ())), None, None, why) for one, why in self._failed.items()]
        rest = [one for one in self.grid.settings() if one not in measured and one not in self._failed]
        possible = self._ideal.can_win(rest, self._bounds(self._best).high)
        with_workers = [self._bounds(one).mean for one in measured if one.executor != INLINE]
        return Result(
            choice=self._choice,
            fastest=self._best,
            start=start,
            speedup=self._bounds(start).mean / self._bounds(self._choice).mean,
            entries=entries,
            diagnosis=self._diagnosis(self._choice, min(with_workers, default=0.0)),
            ruled_out=len(rest) - len(possible),
            untried=len(possible),
            complete=self._complete and self.clock() < self._over_s,
        )
