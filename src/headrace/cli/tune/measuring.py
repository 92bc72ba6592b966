"""Visits of a real loader: made anew under other settings, warmed up, measured, and its workers ended."""

import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe

from headrace.cli.factory.load import FactoryFailed
from headrace.cli.factory.remake import CannotRemake, remade
from headrace.cli.factory.worded import worded
from headrace.executors import Executor, InlineExecutor, ProcessExecutor, RayExecutor, ThreadExecutor
from headrace.executors.process.pool import let_workers_end
from headrace.executors.thread.compute_lock import compute_lock
from headrace.loader import DataLoader
from headrace.loader.options import executor_of
from headrace.memory.sized import batch_bytes
from headrace.progress.source import Kind
from headrace.telemetry.stages import StageTimes
from headrace.telemetry.stats import Stats
from headrace.tuning.race import Visit
from headrace.tuning.search import Limits, SettingFailed, TimeIsOver
from headrace.tuning.settings import INLINE, Setting
from headrace.worker.work import is_iterable

LEAST_S = 0.4
"""How long a visit measures, at least, in seconds."""

_WARM_UP_S = 0.1
"""How long a loader warms up after its first batch, at least, in seconds; the first batch of each worker is in it."""

_LEAST_BATCHES = 5
_ROUNDS = 3
"""A visit measures at least so many batches, and so many of each worker."""

_BLOCKS = 8
"""Into how many runs of batches a visit is divided, at most, to see how much they differ."""

_END_S = 60.0
"""How long the workers of one visit may take to end before the next one begins, in seconds."""

_NAMES: Mapping[type[Executor], str] = {
    ProcessExecutor: "process",
    ThreadExecutor: "thread",
    InlineExecutor: INLINE,
    RayExecutor: "ray",
}


class CannotTune(Exception):
    """The factory, or the loader that it makes, cannot be tuned; the text says why."""


@dataclass(frozen=True)
class Step:
    """Stands for a training step.

    Attributes:
        seconds: How long it takes; 0 without one.
        on_cpu: Whether it computes on the CPU all the time; else it sleeps, as while an accelerator computes.
    """

    seconds: float = 0.0
    on_cpu: bool = False

    def __call__(self) -> None:
        """Take the time of one step: CPU time of this thread, or time."""
        if not self.seconds:
            return
        if not self.on_cpu:
            time.sleep(self.seconds)
            return
        square = torch.ones(64, 64)
        until_s = time.thread_time() + self.seconds
        while time.thread_time() < until_s:
            torch.mm(square, square)  # without the GIL, as a model's operators


class Subject:
    """The user's loader, to be made anew under other settings.

    Args:
        factory: Makes it.

    Raises:
        CannotTune: It raised, or made no loader that can be made anew.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        try:
            loader = factory()
        except FactoryFailed as error:
            raise CannotTune(str(error)) from error
        _check(loader)
        self.loader = loader
        chosen = executor_of(loader.executor, loader.num_workers)
        name = _NAMES.get(type(chosen), "")
        if not name:
            raise CannotTune(
                f"the executor, a {type(chosen).__name__}, is none of headrace's own: leave executor= out."
            )
        workers, prefetch = (0, 0) if name == INLINE else (int(loader.num_workers), int(loader.prefetch_factor or 2))
        self.setting = Setting(name, workers, prefetch, int(loader.fetch_threads))
        self.fetches_singly = is_iterable(loader.dataset) or (loader.batch_size is None and not self._batch_sampler)
        try:
            self.remade(self.setting)
        except CannotTune:
            raise
        except Exception as error:
            text = f"a {type(loader).__qualname__} with the same arguments cannot be made"
            raise CannotTune(f"{text}: {type(error).__name__}: {error}") from error

    @property
    def _batch_sampler(self) -> Any:
        """The user's batch sampler; None if there is none."""
        loader = self.loader
        own = loader._source.kind is Kind.SAMPLER and loader.batch_size is None
        return loader.batch_sampler if own else None

    def executor_of(self, name: str) -> Any:
        """Return the argument that chooses an executor: what the user passed, if it is of that name."""
        own = self.loader.executor
        return own if isinstance(own, Executor) and name == self.setting.executor else name

    def remade(self, setting: Setting) -> Any:
        """Return a loader like the user's, but with a setting. Its workers outlast an epoch.

        Raises:
            CannotTune: Its class does not take the arguments that are tuned, or does not keep its own.
        """
        loader, inline = self.loader, setting.executor == INLINE
        changed = {
            "num_workers": setting.workers,
            "prefetch_factor": None if inline else setting.prefetch_factor,
            "fetch_threads": setting.fetch_threads,
            "executor": self.executor_of(setting.executor),
            "persistent_workers": not inline,
            "max_workers": None,
            **self._samplers(),
        }
        if setting.executor != "process":
            changed["multiprocessing_context"] = None
        if inline:
            changed |= {"timeout": 0, "max_prefetch_bytes": None}
        try:
            optional = ("shuffle", "sampler", "batch_sampler", "max_prefetch_bytes", "max_workers")
            return remade(loader, changed, optional)
        except CannotRemake as error:
            raise CannotTune(
                f"{error}: a loader is tuned by making others like it with other arguments. "
                "Let the factory return a headrace.DataLoader itself."
            ) from error

    def _samplers(self) -> Mapping[str, Any]:
        """Return the arguments that decide on the samples, as the user must have given them."""
        loader, kind = self.loader, self.loader._source.kind
        if kind is Kind.SAMPLER:
            if self._batch_sampler is not None:
                return {"batch_size": 1, "shuffle": None, "sampler": None, "batch_sampler": self._batch_sampler}
            return {"shuffle": None, "sampler": loader.sampler, "batch_sampler": None}
        if kind is Kind.STREAM:
            return {"shuffle": None, "sampler": None, "batch_sampler": None}
        return {"shuffle": bool(loader._source.order.random), "sampler": None, "batch_sampler": None}


def _check(loader: Any) -> None:
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    if isinstance(loader, DataLoader):
        if isinstance(loader.dataset, IterDataPipe | MapDataPipe):
            raise CannotTune("the dataset is a datapipe, which torch's own iterators read. Use a Dataset.")
        return
    if isinstance(loader, torch.utils.data.DataLoader):
        raise CannotTune(f"the factory returned torch's own DataLoader ({kind}). Import DataLoader from headrace.")
    raise CannotTune(f"the factory returned a {kind}: expected a headrace.DataLoader.")


class Visitor:
    """Visits settings of a loader: the `measure` of a `Search`.

    Args:
        subject: The loader.
        step: The training step.
        least_s: How long a visit measures, at least.
    """

    def __init__(self, subject: Subject, step: Step, least_s: float = LEAST_S) -> None:
        self._subject, self._step, self._least_s = subject, step, least_s
        self._visits = 0

    def __call__(self, setting: Setting, limits: Limits) -> Visit:
        """Visit a setting.

        Raises:
            SettingFailed: Reading under the setting raised.
            TimeIsOver: The deadline came before there were enough batches.
            CannotTune: The loader has no batches, or none the second time.
        """
        loader = None
        try:
            loader = self._subject.remade(setting)
            if self._visits and loader._source.planned():
                loader.set_epoch(self._visits)  # other samples first, which the system does not have in memory yet
            self._visits += 1
            with closing(_batches(loader, first=self._visits == 1)) as batches:
                return self._visit(loader, batches, setting, limits)
        except (CannotTune, TimeIsOver, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise SettingFailed(worded(error)) from error
        finally:
            if loader is not None:
                _end(loader)

    def _visit(self, loader: Any, batches: Iterator[Any], setting: Setting, limits: Limits) -> Visit:
        now_s = time.monotonic
        began_s = now_s()
        batch = next(batches)
        first_s = now_s()
        size, count = batch_bytes(batch), 1
        self._step()
        while count < max(2, setting.workers + 1) or now_s() - first_s < _WARM_UP_S:
            if now_s() >= limits.deadline_s:
                raise TimeIsOver
            batch = next(batches)
            self._step()
            count += 1
            if count > setting.workers + 1 and (now_s() - first_s) / (count - 1) > limits.cut_above_s:
                break
        alone = setting == Setting(INLINE) and not self._step.on_cpu  # all is done by this thread
        before, queue_s, wait_s, cpu_s, times = loader.stats(), _queue_s(), 0.0, 0.0, [now_s()]
        least = max(_LEAST_BATCHES, _ROUNDS * setting.workers)
        cut = False
        while not (len(times) > least and times[-1] - times[0] >= self._least_s):
            asked_s, asked_cpu_s = times[-1], time.thread_time()
            batch = next(batches)  # the last batch is held until then, as in a loop
            wait_s += now_s() - asked_s
            cpu_s += time.thread_time() - asked_cpu_s
            self._step()
            times.append(now_s())
            taken = len(times) - 1
            enough = taken >= max(2, setting.workers)
            if times[-1] >= limits.deadline_s:
                if not enough:
                    raise TimeIsOver
                break
            if enough and (times[-1] - times[0]) / taken > limits.cut_above_s:
                cut = True
                break
        del batch
        taken = len(times) - 1
        after: Stats = loader.stats()
        stages = StageTimes(
            *((getattr(after, name) - getattr(before, name)) / taken for name in StageTimes._fields),
        )
        if setting.executor == INLINE and not stages.read_cpu_s:  # gathered in memory: no clock was read
            stages = stages._replace(read_cpu_s=min(stages.read_s, cpu_s / taken))
        return Visit(
            seconds=(times[-1] - times[0]) / taken,
            wait_s=wait_s / taken,
            start_s=first_s - began_s,
            batches=taken,
            spread=_spread(times, max(1, setting.workers)),
            stages=stages,
            transport_s=(after.transport_s - before.transport_s) / taken,
            rank_cpu_s=cpu_s / taken,
            queue_s=(_queue_s() - queue_s) / taken if alone else 0.0,
            batch_bytes=size,
            cut=cut,
        )


def _batches(loader: Any, first: bool) -> Generator[Any, None, None]:
    """Yield the batches of one epoch after another.

    Args:
        loader: The loader.
        first: Whether nobody has read its samples before.
    """
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            if first:
                raise CannotTune("the loader has no batch at all.")
            raise CannotTune(
                "the loader gives no batch when it is read again: its sampler or iterable dataset can be read once "
                "only. Let its __iter__ begin anew each time."
            )
        first = False


def _queue_s() -> float:
    """Return the seconds that this thread could run, but had no CPU; 0 where the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def _spread(times: Sequence[float], workers: int) -> float:
    """Return the standard error of log(seconds per batch), from the means of runs of batches.

    Each run has as many batches as there are workers or more, since those often come together.
    """
    batches = len(times) - 1
    runs = min(_BLOCKS, batches // workers)
    if runs < 2:
        return 0.0
    ends = [round(number * batches / runs) for number in range(runs + 1)]
    means = [(times[end] - times[start]) / (end - start) for start, end in pairwise(ends)]
    return statistics.stdev(means) / statistics.fmean(means) / math.sqrt(runs)


def _end(loader: Any) -> None:
    """End a loader's workers, and wait until they are gone: they would slow the next visit."""
    kept, loader._iterator = loader._iterator, None
    if kept is not None:
        kept._shutdown_workers()
    del kept
    let_workers_end(_END_S)
    compute_lock.wait_for(lambda: not compute_lock.running, time.monotonic() + _END_S)
