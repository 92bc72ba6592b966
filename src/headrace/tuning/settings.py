"""Settings of a loader that can be tuned, and the grid of those that may be tried."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

Coordinate = Literal["workers", "fetch_threads", "prefetch_factor"]
"""The settings that are numbers."""

COORDINATES: tuple[Coordinate, ...] = get_args(Coordinate)

INLINE = "inline"
"""The executor that loads in the caller's thread: it has no workers, and nothing is loaded ahead."""

_CHEAPEST_FIRST = (INLINE, "thread", "process", "ray")


@dataclass(frozen=True)
class Setting:
    """One way to run a loader.

    Attributes:
        executor: "inline", "thread", "process" or "ray".
        workers: How many workers there are; 0 inline.
        prefetch_factor: Batches that are asked for in advance, for each worker; 0 inline.
        fetch_threads: Samples that each worker fetches at a time.
    """

    executor: str = INLINE
    workers: int = 0
    prefetch_factor: int = 0
    fetch_threads: int = 1

    @property
    def cost(self) -> tuple[int, int, int, int]:
        """What decides between settings that are equally fast, the smallest first: workers, threads, batches ahead."""
        place = _CHEAPEST_FIRST.index(self.executor) if self.executor in _CHEAPEST_FIRST else len(_CHEAPEST_FIRST)
        return self.workers, max(1, self.workers) * self.fetch_threads, self.prefetch_factor, place

    @property
    def ahead(self) -> int:
        """Batches that are asked for in advance."""
        return self.workers * self.prefetch_factor

    def __str__(self) -> str:
        threads = f", fetch_threads={self.fetch_threads}" * (self.fetch_threads > 1)
        if self.executor == INLINE:
            return f"inline{threads}"
        return f"{self.executor} x {self.workers}, prefetch_factor={self.prefetch_factor}{threads}"


@dataclass(frozen=True)
class Grid:
    """The settings that may be tried: every combination of these values.

    Attributes:
        executors: Names of executors.
        workers: Numbers of workers, rising, each >= 1. Inline there are none.
        prefetch_factor: Values of `prefetch_factor`, rising.
        fetch_threads: Values of `fetch_threads`, rising.
        most_ahead: The most batches that may be asked for in advance; None without a limit. The fewest that the values
            allow are always allowed.
    """

    executors: tuple[str, ...]
    workers: tuple[int, ...]
    prefetch_factor: tuple[int, ...]
    fetch_threads: tuple[int, ...] = (1,)
    most_ahead: int | None = None

    def settings(self) -> list[Setting]:
        """Return all settings, the cheapest first."""
        found = []
        if INLINE in self.executors:
            found += [Setting(INLINE, 0, 0, threads) for threads in self.fetch_threads]
        pools = [name for name in self.executors if name != INLINE]
        found += [Setting(*one) for one in product(pools, self.workers, self.prefetch_factor, self.fetch_threads)]
        return sorted(filter(self._fits, found), key=lambda one: one.cost)

    def _fits(self, setting: Setting) -> bool:
        least = min(self.workers) * min(self.prefetch_factor)
        return self.most_ahead is None or setting.ahead <= max(self.most_ahead, least)

    def nearest(self, setting: Setting) -> Setting:
        """Return the setting of the grid that is most like another one: of its executor, if that is in the grid."""

        def distance(other: Setting) -> tuple[bool, float]:
            steps = (_apart(getattr(other, name), getattr(setting, name)) for name in COORDINATES)
            return other.executor != setting.executor, sum(steps)

        return min(self.settings(), key=distance)

    def step(self, setting: Setting, name: Coordinate, up: bool) -> Setting | None:
        """Return the setting with the next larger or smaller value of one coordinate; None if the grid ends there."""
        if setting.executor == INLINE and name != "fetch_threads":
            return None
        now, values = getattr(setting, name), getattr(self, name)
        beyond = [value for value in values if (value > now if up else value < now)]
        if not beyond:
            return None
        found = replace(setting, **{name: min(beyond) if up else max(beyond)})
        return found if self._fits(found) else None

    def on(self, setting: Setting, executor: str) -> Setting | None:
        """Return the setting on another executor; None if the grid has none.

        Without workers so far, it begins with two, one of which can work while the other's batch is in use.
        """
        if executor not in self.executors or executor == setting.executor:
            return None
        if executor == INLINE:
            return Setting(INLINE, 0, 0, setting.fetch_threads)
        if setting.executor != INLINE:
            return replace(setting, executor=executor)
        workers = min(self.workers, key=lambda count: (abs(count - 2), count))
        return Setting(executor, workers, min(self.prefetch_factor), setting.fetch_threads)


def _apart(one: int, other: int) -> float:
    """Return how far apart two counts are: their ratio, the larger over the smaller."""
    low, high = sorted((one + 1, other + 1))
    return high / low
