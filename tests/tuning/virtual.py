"""Loaders that take no time: a model of how fast each setting is, noise from a seed, and a clock that is told."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from headrace.telemetry.stages import StageTimes
from headrace.tuning.race import Visit
from headrace.tuning.search import Limits, SettingFailed, TimeIsOver
from headrace.tuning.settings import INLINE, Grid, Setting

GRID = Grid(("process", "thread", INLINE), (1, 2, 4, 8), (2, 4, 8), (1, 4, 16))


@dataclass(frozen=True)
class Load:
    """A batch's work.

    Attributes:
        blocked_s: Seconds in which it waits for storage.
        python_s: CPU seconds with the GIL.
        native_s: CPU seconds without it.
        transport_s: Seconds of copying it between processes.
    """

    blocked_s: float = 0.0
    python_s: float = 0.0
    native_s: float = 0.0
    transport_s: float = 0.0

    def seconds(self, setting: Setting, cpus: float) -> float:
        """Seconds between batches, if nothing else limits them."""
        at_a_time = setting.fetch_threads
        cpu_s = self.python_s + self.native_s
        one = max(self.blocked_s / at_a_time + self.python_s + self.native_s / min(at_a_time, cpus), 1e-4)
        if setting.executor == INLINE:
            return one
        rate = max(one / setting.workers, cpu_s / cpus)
        if setting.executor == "thread":
            return max(rate, self.python_s)
        return max(rate, self.transport_s)


@dataclass
class Virtual:
    """Measures settings of a load in virtual time.

    Attributes:
        load: The load.
        cpus: The machine's CPUs.
        sigma: The noise of a visit.
        rugged: How much settings differ by themselves: the standard deviation of log(seconds).
        step_s: The training step.
        seed: Seeds the noise.
        least_s: How long a visit measures, at least.
        failing: Executors that cannot be used.
        change: How many times slower the machine is at a time.
        modes: The share of a setting's visits that are slow, and how many times slower loading is in them.
        now_s: The time.
        visited: The settings that were visited.
    """

    load: Load
    cpus: float = 4.0
    sigma: float = 0.0
    rugged: float = 0.0
    step_s: float = 0.0
    seed: int = 0
    least_s: float = 0.5
    failing: tuple[str, ...] = ()
    change: Callable[[float], float] = lambda now_s: 1.0
    modes: Callable[[Setting], tuple[float, float]] = lambda setting: (0.0, 1.0)
    now_s: float = 0.0
    visited: list[Setting] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.rng_of_modes = np.random.default_rng([self.seed, 2])

    def clock(self) -> float:
        return self.now_s

    def steady_s(self, setting: Setting, slower: float = 1.0) -> float:
        """Seconds per step without noise.

        Args:
            setting: The setting.
            slower: How many times slower loading is than in the setting's fast mode.
        """
        own = np.random.default_rng([self.seed, zlib.crc32(str(setting).encode())]).standard_normal()
        load_s = slower * self.load.seconds(setting, self.cpus) * math.exp(self.rugged * own)
        return load_s + self.step_s if setting.executor == INLINE else max(load_s, self.step_s)

    def mean_s(self, setting: Setting) -> float:
        """Seconds per step without noise, in the mean over fast and slow visits."""
        share, slower = self.modes(setting)
        return (1 - share) * self.steady_s(setting) + share * self.steady_s(setting, slower)

    def __call__(self, setting: Setting, limits: Limits) -> Visit:
        if setting.executor in self.failing:
            raise SettingFailed(f"no {setting.executor} here")
        self.visited.append(setting)
        share, slower = self.modes(setting)
        steady_s = self.steady_s(setting, slower if self.rng_of_modes.random() < share else 1.0)
        seconds = steady_s * math.exp(self.sigma * self.rng.standard_normal()) * self.change(self.now_s)
        took_s = max(self.least_s, (5 + 2 * setting.workers) * seconds)
        if seconds > limits.cut_above_s:
            took_s = 3 * seconds
        if self.now_s + took_s > limits.deadline_s:
            self.now_s = limits.deadline_s
            raise TimeIsOver
        self.now_s += took_s
        cpu_s = self.load.python_s + self.load.native_s
        stages = StageTimes(read_s=cpu_s + self.load.blocked_s / setting.fetch_threads, read_cpu_s=cpu_s)
        transport_s = self.load.transport_s * (setting.executor == "process")
        return Visit(seconds, seconds - self.step_s, 0.01, 10, 0.0, stages, transport_s, batch_bytes=1000)


def bursts(seed: int, gap_s: float = 4.0, length_s: float = 1.0, slower: float = 1.6) -> Callable[[float], float]:
    """A machine that others use in bursts, each of its own length and weight.

    Args:
        seed: Seeds the bursts.
        gap_s: The mean time between them.
        length_s: Their mean length.
        slower: How many times slower the machine is during one, in the mean.
    """
    rng, until_s, found = np.random.default_rng([seed, 1]), 0.0, []
    while until_s < 400:
        begins_s = until_s + rng.exponential(gap_s)
        until_s = begins_s + rng.exponential(length_s)
        found.append((begins_s, until_s, 1 + (slower - 1) * rng.uniform(0.5, 1.5)))
    return lambda now_s: next((times for begins_s, ends_s, times in found if begins_s <= now_s < ends_s), 1.0)
