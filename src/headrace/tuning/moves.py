"""Which settings to try next: steps along one coordinate, the most promising first, and none that cannot win."""

from collections.abc import Iterable, Iterator

from headrace.tuning.diagnosis import Limit, Machine, cpu_s, work_s
from headrace.tuning.race import Visit
from headrace.tuning.settings import COORDINATES, INLINE, Coordinate, Grid, Setting

Move = tuple[Coordinate, bool] | str
"""A coordinate, and whether it rises; or "executor"."""

_UP: tuple[Move, ...] = (("workers", True), ("fetch_threads", True), ("prefetch_factor", True))
_DOWN: tuple[Move, ...] = (("fetch_threads", False), ("workers", False), ("prefetch_factor", False))

_FIRST: dict[Limit, tuple[Move, ...]] = {
    Limit.STORAGE: (("fetch_threads", True), ("workers", True)),
    Limit.CPU: (("workers", True), "executor"),
    Limit.GIL: ("executor", ("fetch_threads", False)),
    Limit.TRANSPORT: ("executor", ("workers", True), ("workers", False)),
    Limit.UNEVEN: (("prefetch_factor", True), ("workers", True)),
}
"""What is tried first, by what limits the present setting."""

_SLACK = 1.25
"""A setting is left out if even its ideal time is so many times the best one: stage times are no constants."""


def moves(setting: Setting, grid: Grid, limit: Limit) -> list[Setting]:
    """Return the neighbours of a setting in the order in which they are to be tried."""
    order: tuple[Move, ...] = (*_FIRST.get(limit, ()), *_UP, "executor", *_DOWN)
    if setting.executor == INLINE:
        order = ("executor", *order)  # nothing is loaded ahead
    found: dict[Setting, None] = {}
    for move in order:
        found |= dict.fromkeys(_moved(setting, grid, move))
    # One step each of two coordinates: a second worker may help elsewhere although it does not here, as with the GIL.
    more = grid.step(setting, "workers", up=True)
    if more is not None:
        found |= dict.fromkeys(_moved(more, grid, "executor"))
    return list(found)


def cheaper(setting: Setting, grid: Grid) -> list[Setting]:
    """Return settings that cost less than one and may be as fast, the largest saving first."""
    found: dict[Setting, None] = {}
    for name in COORDINATES:
        down = grid.step(setting, name, up=False)
        if down is None:
            continue
        found[down] = None
        if name == "workers":
            others: list[Setting | None] = [grid.step(down, "fetch_threads", True)]
            others += [grid.on(down, executor) for executor in grid.executors if executor != INLINE]
            found |= dict.fromkeys(one for one in others if one is not None)
    if setting.executor != INLINE:
        found |= dict.fromkeys(one for one in (grid.on(setting, name) for name in grid.executors) if one is not None)
    return sorted((one for one in found if one.cost < setting.cost), key=lambda one: one.cost[0])


def _moved(setting: Setting, grid: Grid, move: Move) -> Iterator[Setting]:
    if isinstance(move, str):
        names = sorted(grid.executors, key=lambda name: name == INLINE)
        targets = [grid.on(setting, name) for name in names]
    else:
        targets = [grid.step(setting, *move)]
    yield from (one for one in targets if one is not None)


class Ideal:
    """The least seconds per step that a setting can take, if its workers and threads do not hinder each other.

    A batch costs `w` seconds of work and `c` CPU seconds of it, the least that was seen with one sample at a time. It
    takes a setting at least w / (workers x fetch_threads), and c / CPUs; inline the training step comes on top.

    Args:
        machine: The machine, and the training step.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._work_s = self._cpu_s = 0.0

    def see(self, setting: Setting, visit: Visit) -> None:
        """Learn from a visit."""
        if setting.fetch_threads > 1:
            return
        self._work_s = min(work_s(visit), self._work_s or work_s(visit))
        self._cpu_s = min(cpu_s(visit), self._cpu_s or cpu_s(visit))

    def seconds(self, setting: Setting) -> float:
        """Return the least seconds per step."""
        at_a_time = max(1, setting.workers) * setting.fetch_threads
        load_s = self._work_s / at_a_time
        if setting.executor != "ray":  # whose workers have other machines' CPUs
            load_s = max(load_s, self._cpu_s / self._machine.cpus)
        if setting.executor == INLINE:
            return load_s + self._machine.step_s
        return max(load_s, self._machine.step_s)

    def can_win(self, settings: Iterable[Setting], best_s: float) -> list[Setting]:
        """Return those settings that may take no longer than the best so far."""
        return [one for one in settings if self.seconds(one) <= _SLACK * best_s]
