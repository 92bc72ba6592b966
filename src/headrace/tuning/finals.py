"""The last rounds of a search: its finalists are visited again, and only these visits decide.

The comparisons before are misled by two things. A setting may be fast in some visits and slow in others by itself: one
with several threads of torch's, for instance, slows down as soon as another program uses a CPU. The faster half of its
visits does not show that. And the best of many settings has often been measured too fast by chance.

Each round visits every finalist once, in another order than the round before. What counts is the mean of the seconds
per step over the rounds, since training takes all of them: slow visits count as the others do. The choice is the
cheapest finalist whose mean is within 3 % of the least.

The rounds end early if none of the others can be the choice, by two standard errors: those that cost more than the
choice are not faster than it by more than 3 %, and those that cost less are slower than the fastest. Finalists are
compared by their differences in the same round, so that a change of the machine's load changes both. The standard error
of a mean difference is that of these differences, together with the noise of the search, which counts as eight more.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from headrace.tuning.race import DEVIATIONS, MOST_VISITS, TOLERANCE, Bounds, Visit
from headrace.tuning.settings import Setting

FINALISTS = 3
"""How many settings are visited in the last rounds, at most."""

LEAST_ROUNDS, MOST_ROUNDS = 4, 12
"""How many last rounds there are; with fewer than the least they decide nothing."""

_FACTOR = 1.4
"""How many times slower than the fastest a finalist may have been before."""

_PRIOR_WEIGHT = 8
"""As how many differences the noise of the search counts."""

RULE = (
    f"two settings are visited in turn until the means of log(seconds per step), over the faster half of the visits, "
    f"differ by {DEVIATIONS:g} standard errors, at most {MOST_VISITS} times each; settings within {TOLERANCE:.0%} are "
    f"equal, and the fewest workers win; that they are equal takes up to {2 * MOST_VISITS} visits in noise; then up to "
    f"{FINALISTS} finalists are visited in {LEAST_ROUNDS} to {MOST_ROUNDS} rounds, whose means of seconds decide"
)


def finalists(choice: Setting, fastest: Setting, means: Mapping[Setting, float]) -> list[Setting]:
    """Return the settings that are worth further visits, the choice first.

    These are the choice, the fastest, the fastest of each other executor, and the fastest of the rest, as far as they
    were nearly as fast.

    Args:
        choice: The choice so far.
        fastest: The fastest setting so far.
        means: The seconds per step of the settings that were measured.
    """
    ordered = sorted(means, key=means.__getitem__)
    found = list(dict.fromkeys((choice, fastest)))
    for one in ordered:
        if one.executor not in {other.executor for other in found}:
            found.append(one)
    found += [one for one in ordered if one not in found][:1]
    return [one for one in found if one == choice or means[one] <= _FACTOR * means[fastest]][:FINALISTS]


@dataclass
class Finals:
    """The last rounds.

    Attributes:
        settings: The finalists; the choice so far is the first.
        sigma: The noise of a visit before, as a standard deviation of log(seconds).
        rounds: The visits of each round.
    """

    settings: list[Setting] = field(default_factory=list)
    sigma: float = 0.0
    rounds: list[dict[Setting, Visit]] = field(default_factory=list)

    def order(self) -> Sequence[Setting]:
        """Return the finalists in the order of the next round: rounds go through all orders."""
        orders = list(permutations(self.settings))
        return orders[len(self.rounds) % len(orders)]

    def drop(self, setting: Setting) -> None:
        """Take out a finalist that failed."""
        self.settings.remove(setting)
        self.rounds = [{one: visit for one, visit in found.items() if one != setting} for found in self.rounds]

    @property
    def enough(self) -> bool:
        """Tell whether there are enough rounds to decide."""
        return len(self.rounds) >= LEAST_ROUNDS

    @property
    def over(self) -> bool:
        """Tell whether no further round is needed."""
        if len(self.settings) < 2 or len(self.rounds) >= MOST_ROUNDS:
            return True
        if not self.enough:
            return False
        choice = self.choice()
        return not any(self._can_be_chosen(one, choice) for one in self.settings if one != choice)

    def fastest(self) -> Setting:
        """Return the finalist with the least mean."""
        return min(self.settings, key=self._mean)

    def choice(self) -> Setting:
        """Return the cheapest finalist that is as fast as the fastest."""
        most = (1 + TOLERANCE) * self._mean(self.fastest())
        return min((one for one in self.settings if self._mean(one) <= most), key=lambda one: one.cost)

    def bounds(self, setting: Setting) -> Bounds:
        """Return the mean of a finalist's seconds per step over the rounds, and its bounds."""
        mean = self._mean(setting)
        error = self._error([seconds / mean for seconds in self._seconds(setting)], self.sigma)
        return Bounds(*(mean * math.exp(times * DEVIATIONS * error) for times in (-1, 0, 1)))

    def difference(self, setting: Setting, other: Setting) -> tuple[float, float]:
        """Return how much slower a finalist is than another, as a share of the other's mean, and the standard error."""
        mean, pairs = self._mean(other), zip(self._seconds(setting), self._seconds(other), strict=True)
        shares = [(mine - theirs) / mean for mine, theirs in pairs]
        return sum(shares) / len(shares), self._error(shares, math.sqrt(2) * self.sigma)

    def _can_be_chosen(self, setting: Setting, choice: Setting) -> bool:
        """Tell whether further rounds may make another finalist the choice."""
        costs_more = setting.cost > choice.cost
        difference, error = self.difference(setting, choice if costs_more else self.fastest())
        return difference - DEVIATIONS * error <= (-TOLERANCE if costs_more else 0)

    def _seconds(self, setting: Setting) -> list[float]:
        return [found[setting].seconds for found in self.rounds]

    def _mean(self, setting: Setting) -> float:
        seconds = self._seconds(setting)
        return sum(seconds) / len(seconds)

    def _error(self, shares: Sequence[float], sigma: float) -> float:
        """Return the standard error of the mean of some shares, with a prior standard deviation of one of them."""
        mean = sum(shares) / len(shares)
        squares = _PRIOR_WEIGHT * sigma**2 + sum((share - mean) ** 2 for share in shares)
        return math.sqrt(squares / (_PRIOR_WEIGHT + len(shares) - 1) / len(shares))
