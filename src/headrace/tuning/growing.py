"""How many workers a loader should have, decided while it runs, from figures of its batches.

Figures are taken in rounds: one batch of each worker, and at least two batches. They are means over the last rounds
with one number of workers. For each batch there are the seconds of its step, from one `next()` to the next one; the
part of it in which the trainer *waits* for the workers; the rest, which is the trainer's *own* time; and the wall and
CPU seconds of *work* that a worker spent on it.

**Growing.** If the trainer waits, steps could take its own time alone, so that many times more workers would keep up,
and a margin. There are at most twice as many as before, and as many as the CPUs are for: CPU seconds per second of work
say how much of a CPU each worker uses, so that workers which mostly sleep may be more than the CPUs. What more workers
have brought is judged before there are still more. If steps did not become shorter, the former number comes back, and
the next attempt is later.

**Shrinking.** If the trainer does not wait, the workers that are busy on average are work / step. If fewer workers
would do, several times in a row, there are fewer. If the trainer then waits, the former number comes back, and the next
attempt is later. Numbers that were too few before need more patience from the start.

What was learned is forgotten when the work or the trainer's own time changes. Nothing here reads a clock, and the same
figures lead to the same numbers. `tests/tuning/test_growing_simulated.py` has simulations.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.tuning.rounds import Figures, Round, figures

WAITS = 0.05
"""The trainer waits if it spends more than this share of its time on it. Less is within what batches that take longer
than others cause, and a loader with a tenth of waiting would be slower than the fastest by that tenth."""

IDLE_WAITS = 0.02
"""There may be fewer workers if the trainer waits less than this share. The gap to `WAITS` keeps the rules apart."""

MARGIN = 1.25
"""So many times the workers that just keep up. Where all are busy all the time, one long batch delays the others."""

BUSY = 0.7
"""Fewer workers would do if they were busy for this share of the time or less. After growing they are busy for about
1 / `MARGIN` = 0.8 of it. The gap keeps the rules apart."""

CPU_FULL = 0.95
"""The CPUs are used up at this share of them. A worker that computes all the time uses a little less than one CPU, so
without this there would be one more than the CPUs."""

LEAST_ROUNDS, MOST_ROUNDS, ENOUGH_STEPS = 4, 16, 64
"""Figures are means over the last rounds, at least four and at most sixteen. After sixteen rounds, or after 64 steps
where that is less, decisions are not put off any more. The mean of 64 times whose standard deviation is as large as
their mean, as that of exponential ones, has an error of an eighth."""

WARM_UP = 3
"""The first rounds with another number of workers do not count, and more where more batches are asked for in advance.
New workers open files, fill caches and import modules for their first batches; and the batches that come first after
some have left were asked for before."""

PRECISE = 0.2
"""Before the number grows, the error of a step is at most this share, or there were enough rounds: what growing brings
is measured against it."""

LEAST_GAIN, SHARE_OF_GAIN = 0.05, 0.25
"""Growing has failed if it brought less than this, as log(seconds before / after), and less than this share of what
it should have brought. Where it brought more, it is worth a worker that mostly waits."""

LEAST_ERROR = 0.01
"""The relative error of a mean is taken for this much at least: a few rounds may be alike by chance."""

LONGER, SERVED = 0.5, 1.1
"""Growing has failed, too, if the work on a batch became longer by half of what there are more workers, as logarithms:
then something serves only so many workers at a time, such as a disk, and the others wait for it. How many it serves
follows from how much longer the work is; there are then a tenth more than that."""

NEW_SPREAD = 0.3
"""Figures from before are no measure if the work has a spread larger than this now, and twice as large as then: they
lack the batches that take long. Growing counts as useful then."""

RETRY_ROUNDS, LATER = 16, 4
"""After growing has failed, it is tried again after so many rounds, and each time it fails after four times as many.
The first attempt may have failed by chance. In a thousand rounds there are four, of four to sixteen rounds each."""

SHRINK_ROUNDS, SHRINK_TIMES = 8, 3
"""Whether there should be fewer workers is asked every eight rounds, and must be so three times in a row. Workers cost
memory, but starting them again costs more."""

PATIENCE = 48
"""So often in a row it must be so where the smaller number was too small before, with the same load; and four times as
often after each time that this proved wrong."""

CHANGED = 0.35
"""The load has changed if work or own time is 1.4 times as long or as short, as a difference of logarithms, and twice
the error more, and if that is no less of a step than `WAITS`. What was learned is then forgotten."""

LATE_S = 60.0
"""Workers that have not come up after this time, in seconds, are not waited for. The number goes back to those that are
up. Importing a project's modules on a busy machine takes less."""

LONG_STEP = 10.0
"""An own time that is longer than so many average ones counts as so many: a checkpoint says nothing about steps."""

_OWN_WEIGHT = 1 / 16


class _Attempt(NamedTuple):
    """A number of workers that is on trial.

    Attributes:
        back: The number before.
        before: The figures with it.
        spread: The largest spread of the work that had been seen until then.
    """

    back: int
    before: Figures
    spread: float


class Growing:
    """Decides how many workers there should be.

    Args:
        least: The smallest number, >= 1.
        most: The largest number.
        cpus: CPUs that the workers may use together; infinite where they have others than this machine's.
        fits: Called before growing with the number of workers to add; returns how many of them there is room for, such
            as memory. None if there is room for all.
        workers: The number to begin with; `least` if it is None.
        ahead: How many batches are asked for in advance, for each worker.

    Attributes:
        workers: The number of workers that there should be.
    """

    def __init__(
        self,
        least: int,
        most: int,
        cpus: float = math.inf,
        fits: Callable[[int], int] | None = None,
        workers: int | None = None,
        ahead: int = 2,
    ) -> None:
        self._least, self._most, self._cpus, self._fits = least, most, cpus, fits
        self._warm_up = max(WARM_UP, ahead + 1)
        self._own_s = 0.0  # a moving average
        self._rounds: deque[Round] = deque(maxlen=MOST_ROUNDS)
        self._steps: list[Sequence[float]] = []  # of the present round
        self._skipped = self._counted = self._idle_times = 0
        self._late_s = 0.0
        self._attempt: _Attempt | None = None
        self._first: Figures | None = None  # since the load last changed
        self._known: dict[int, Figures] = {}  # likewise, by the number of workers
        self._spread = 0.0  # of the work, the largest so far
        self._too_few = 0  # the largest number at which the trainer waited
        self._shrunk_from = 0
        self._patience = PATIENCE
        self._barred, self._retry_rounds = 0, RETRY_ROUNDS  # rounds until growing is tried again, and after a failure
        self.workers = least if workers is None else workers
        self._move(self.workers)

    def go_on_from(self, workers: int) -> None:
        """Have another number of workers, since the user or the system says so."""
        self._attempt = None
        self._shrunk_from = 0
        self._move(workers)

    def begin(self, new_workers: bool) -> None:
        """Note that a pass begins: its first batches were all asked for at once, and new workers warm up."""
        self._late_s = 0.0
        self._wait(self._warm_up * self.workers if new_workers else self.workers)

    def refuse(self) -> None:
        """Note that the system has refused the last growth; the next attempt is later."""
        self._go_back(self.workers if self._attempt is None else self._attempt.back)

    def note(self, step_s: float, wait_s: float, work_s: float, cpu_s: float, up: int) -> int:
        """Note a step, and return how many workers there should be.

        Args:
            step_s: Seconds from asking for a batch to asking for the next one.
            wait_s: The seconds of these in which the trainer waited for the workers.
            work_s: The seconds that a worker spent on the batch.
            cpu_s: The CPU seconds of these.
            up: How many workers are up.
        """
        if up < self.workers:
            self._late_s += step_s
            self._wait(self._warm_up * self.workers)
            if self._late_s > LATE_S and max(up, self._least) < self.workers:
                self._go_back(max(up, self._least))
            return self.workers
        self._late_s = 0.0
        if self._skipped:
            self._skipped -= 1
            return self.workers
        own_s = max(step_s - wait_s, 0.0)
        if self._own_s:
            own_s = min(own_s, LONG_STEP * self._own_s)
        self._own_s += (own_s - self._own_s) * (_OWN_WEIGHT if self._own_s else 1.0)
        self._steps.append((own_s + wait_s, wait_s, work_s, cpu_s))
        if len(self._steps) >= max(2, self.workers):
            self._rounds.append(Round.of(self._steps))
            self._steps.clear()
            self._decide()
        return self.workers

    def _decide(self) -> None:
        self._counted += 1
        self._barred -= self._barred > 0
        now = figures(self._rounds, self._spread)
        if now is None or now.rounds < LEAST_ROUNDS:
            return
        self._spread = max(self._spread, now.spread)
        self._notice_change(now)
        if self._attempt is not None and self._judge(self._attempt, now):
            return
        if self._waits(now):
            self._grow(now)
        elif self._counted % SHRINK_ROUNDS == 0:
            self._consider_fewer(now)

    def _waits(self, now: Figures) -> bool:
        """Tell whether the trainer waits, with more certainty where there are few rounds."""
        return now.waiting - (1 if _enough(now) else 2) * now.waiting_error > WAITS

    # Growing.

    def _grow(self, now: Figures) -> None:
        workers, attempt = self.workers, self._attempt
        if self._shrunk_from > workers:  # shrinking was wrong
            target, self._shrunk_from = self._shrunk_from, 0
            self._patience *= LATER
            self._too_few = target - 1
            self._move(target)
            return
        if attempt is not None or self._barred or (now.step_error > PRECISE and not _enough(now)):
            return
        target = min(self._wanted(now), self._most)
        if target > workers and self._fits is not None:
            target = min(target, workers + self._fits(target - workers))
            self._barred = 0 if target > workers else RETRY_ROUNDS
        if target > workers:
            self._too_few = max(self._too_few, workers)
            self._attempt = _Attempt(workers, now, self._spread)
            self._move(target)

    def _wanted(self, now: Figures) -> int:
        """Return the number of workers for a trainer that waits."""
        target = math.ceil(self.workers * min(MARGIN * now.step_s / max(now.own_s, 1e-9), 2.0))
        if now.cpu_s > 0 and math.isfinite(self._cpus):
            if now.cpu_s / now.step_s >= CPU_FULL * self._cpus:
                return self.workers
            target = min(target, math.ceil(CPU_FULL * self._cpus * max(now.work_s / now.cpu_s, 1.0)))
        return target

    def _judge(self, attempt: _Attempt, now: Figures) -> bool:
        """Judge the last growth; return True if the number of workers has changed for it."""
        before, enough = attempt.before, _enough(now)
        unknown = self._spread > NEW_SPREAD and self._spread > 2 * attempt.spread
        if unknown or now.waiting + 2 * now.waiting_error < WAITS:
            self._attempt = None
            return False
        # Rounds before may have lacked the long batches that were seen since.
        known = self._spread / math.sqrt(before.steps)
        ideal_s = max(before.own_s, before.step_s * attempt.back / self.workers)
        useful = min(LEAST_GAIN, SHARE_OF_GAIN * math.log(before.step_s / ideal_s)) if ideal_s else LEAST_GAIN
        gain = math.log(before.step_s / now.step_s)
        before_error = max(before.step_error, before.waiting * known, LEAST_ERROR)
        error = math.hypot(before_error, max(now.step_error, LEAST_ERROR))
        if gain + 2 * error < useful and (enough or now.rounds >= 2 * LEAST_ROUNDS):
            self._go_back(attempt.back)
            return True
        longer = math.log(now.work_s / before.work_s) if before.work_s > 0 < now.work_s else 0.0
        work_error = math.hypot(max(before.work_error, known), now.work_error)
        if gain < useful and longer - 2 * work_error > LONGER * math.log(self.workers / attempt.back):
            served = self.workers / math.exp(longer)
            self._go_back(min(self.workers, max(attempt.back, round(SERVED * served))))
            return True
        if enough or gain - error > useful:
            self._attempt = None
            self._barred = 0 if gain > useful else MOST_ROUNDS
        return False

    def _go_back(self, workers: int) -> None:
        self.go_on_from(workers)
        self._barred = self._retry_rounds
        self._retry_rounds *= LATER

    # Shrinking.

    def _consider_fewer(self, now: Figures) -> None:
        busy = now.work_s / now.step_s
        fewer = max(self._least, math.ceil(busy * (1 + now.work_error) / BUSY), (self.workers + 1) // 2)
        if now.waiting > IDLE_WAITS or fewer >= self.workers or self._attempt is not None:
            self._idle_times = 0
            return
        self._idle_times += 1
        if self._idle_times < self._patience:
            fewer = max(fewer, self._too_few + 1)
        if self._idle_times >= SHRINK_TIMES and fewer < self.workers:
            self._shrunk_from = self.workers
            self._move(fewer)

    # What was learned.

    def _notice_change(self, now: Figures) -> None:
        """Forget what was learned if the load has changed since it was first measured.

        Work is compared with that of the same number of workers, since they may delay each other.
        """
        if self._first is None:
            self._first = now
        if now.rounds < 2 * LEAST_ROUNDS:
            return
        then, known = self._first, self._known.setdefault(self.workers, now)
        own_errors, work_errors = then.own_error + now.own_error, known.work_error + now.work_error
        if _changed(then.own_s, now.own_s, own_errors, WAITS * now.step_s) or _changed(
            known.work_s, now.work_s, work_errors, WAITS * now.step_s * self.workers
        ):
            self._forget()
            self._first = self._known[self.workers] = now

    def _forget(self) -> None:
        self._first = None
        self._known = {}
        self._spread = 0.0
        self._too_few = self._shrunk_from = 0
        self._patience = PATIENCE
        self._barred, self._retry_rounds = 0, RETRY_ROUNDS
        self._attempt = None

    def _move(self, workers: int) -> None:
        most, self.workers = max(workers, self.workers), workers
        self._late_s, self._counted, self._idle_times = 0.0, 0, 0
        self._rounds.clear()
        self._wait(self._warm_up * most)

    def _wait(self, steps: int) -> None:
        self._skipped = steps
        self._steps = []


def _enough(now: Figures) -> bool:
    """Tell whether more rounds would not say much more."""
    return now.rounds >= MOST_ROUNDS or now.steps >= ENOUGH_STEPS


def _changed(then_s: float, now_s: float, errors: float, least_s: float) -> bool:
    """Tell whether a time has changed, by `CHANGED` and at least so many seconds."""
    if then_s <= 0 or now_s <= 0 or abs(now_s - then_s) < least_s:
        return False
    return abs(math.log(now_s / then_s)) > CHANGED + 2 * errors
