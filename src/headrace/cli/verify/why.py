"""Finds out why a sample differs from one reading to the next: what it draws from, reads or keeps without a seed."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils import worker as torch_worker

from headrace.cli.verify.cells import start_forkserver
from headrace.cli.verify.digest import DigestingCollate, SampleDigest
from headrace.cli.verify.reads import Call, recorded
from headrace.cli.verify.watch import Change, Watch
from headrace.plan import Plan
from headrace.types import PlanTask
from headrace.worker.fetch import fetches_in_bulk
from headrace.worker.work import Work
from headrace.worker.worker import Worker

_BUILDS = 4
"""How many times the dataset is made and compared. Once would not do: random parts may be equal by chance."""

_OTHERS = 16
"""How many samples on either side of a sample are fetched before it, to see whether that matters."""

_NAMED = 5
"""How many of the things that are found are named."""

_DRAW = (
    "Draw from headrace.rng() or headrace.torch_rng(), or from the global generators of torch, numpy and random: all "
    "of them are seeded anew for every sample."
)
_BUILD = (
    "Every rank builds its own: seed what the factory draws, sort what it lists, and read the same files everywhere."
)
_INDEX = "Make the sample a function of its index alone; a worker has its own copy of the dataset and of every module."
_FIRST = (
    "Compute what is kept when the dataset is made, or from constants alone: every process, and every thread that has "
    "its own, keeps another."
)


class Seen(NamedTuple):
    """The result of a fetch.

    Attributes:
        whole: The sample's digest.
        calls: Calls whose results no seed determines.
        changed: Objects that it has changed.
    """

    whole: bytes
    calls: list[Call]
    changed: list[Change]


@dataclass(frozen=True)
class Fetch:
    """Fetches one sample in the calling process, under the seeds of its position.

    Attributes:
        plan: A plan for a world of one, with one sample a step.
        batched: Whether the loader makes batches.
        epoch: The sample's epoch.
        position: Its place in the epoch's order.
    """

    plan: Plan
    batched: bool
    epoch: int
    position: int

    def __call__(self, dataset: Any, *before: int) -> Seen:
        """Fetch the samples at other positions, if any are given, and then this one."""
        collate = DigestingCollate(_kept, self.batched)
        worker = Worker(Work(dataset, collate_fn=collate, batched=self.batched, plan=self.plan))
        watch = Watch(dataset)
        with recorded(watch.enter) as calls:
            for position in (*before, self.position):
                found: list[SampleDigest] = worker.run_inline(PlanTask(self.epoch, position))
        return Seen(found[0].whole, calls, watch.changes())

    def others(self) -> list[int]:
        """Return positions near the sample's."""
        near = range(self.position - _OTHERS, self.position + _OTHERS + 1)
        return sorted({position % self.plan.samples for position in near} - {self.position})


class Probe:
    """Fetches one sample repeatedly, under other conditions each time.

    Args:
        make: Builds the dataset anew.
        fetch: Fetches the sample from a dataset.
    """

    def __init__(self, make: Callable[[], Any], fetch: Fetch) -> None:
        self._make, self._fetch = make, fetch

    def explain(self, executor: str) -> list[str]:
        """Return lines that say why the sample differs, what is to blame, and what to do.

        Args:
            executor: The executor of the cell in which it differed.
        """
        dataset = self._make()
        usual = self._fetch(dataset)
        again = self._fetch(dataset)
        if usual.whole != again.whole:
            said = ["Fetched twice in one process under the same seeds, it differs already."]
            return said + _blamed(again, ("entropy", "clock"))
        return (
            self._of_building(dataset, usual)
            or self._of_others(usual)
            or self._of_surroundings(usual)
            or self._of_bulk(dataset)
            or self._of_process(dataset, usual)
            or self._undecided(again, executor)
        )

    def _of_building(self, dataset: Any, usual: Seen) -> list[str]:
        """Check whether each dataset that the factory makes gives another sample."""
        for _ in range(_BUILDS):
            with recorded() as calls:
                made = self._make()
            other = self._fetch(made)
            if other.whole == usual.whole:
                continue
            said = ["It is the same in one dataset, but not in every one that the factory makes."]
            said += _read(calls + other.calls, ("entropy", "clock"))
            return self._of_time(dataset, usual) or [*said, _BUILD]
        return []

    def _of_time(self, dataset: Any, usual: Seen) -> list[str]:
        """Check whether the dataset gives another sample after some time."""
        later = self._fetch(dataset)
        if later.whole == usual.whole:
            return []
        said = ["Fetched again in the same process under the same seeds, it differs after a while."]
        return said + _blamed(later, ("entropy", "clock"))

    def _of_others(self, usual: Seen) -> list[str]:
        """Check whether the sample depends on those that were fetched before it."""
        found = self._fetch(self._make(), *self._fetch.others())
        if found.whole == usual.whole:
            return []
        return ["It depends on which samples the same process fetched before it.", *_blamed(found, ())]

    def _of_surroundings(self, usual: Seen) -> list[str]:
        """Check whether it depends on something that differs between a worker and the main process."""
        for surrounding, (consequence, remedy) in _SURROUNDINGS.items():
            dataset = self._make()
            with surrounding(dataset):
                found = self._fetch(dataset)
            if found.whole != usual.whole:
                return [consequence, remedy]
        in_thread: list[Seen] = []
        thread = threading.Thread(target=lambda: in_thread.append(self._fetch(self._make())))
        thread.start()
        thread.join()
        if in_thread and in_thread[0].whole != usual.whole:
            return ["It depends on which thread fetches it.", *_of_first(in_thread[0])]
        return []

    def _of_bulk(self, dataset: Any) -> list[str]:
        if not fetches_in_bulk(dataset):
            return []
        return [
            "The dataset has a __getitems__ of its own, which draws for a batch and not for a sample: its draws change "
            "with the batch size, and so with the world.",
            "Leave __getitems__ out, or derive what it draws from each index.",
        ]

    def _of_process(self, dataset: Any, usual: Seen) -> list[str]:
        """Check whether it depends on the process that fetches it, or on what that fetched first."""
        try:
            alone, again, later = (self._elsewhere(*before) for before in ((), (), self._fetch.others()))
        except Exception:  # noqa: BLE001 - the dataset cannot be pickled, or ends its process
            return []
        if of_time := self._of_time(dataset, usual):
            return of_time
        if alone.whole != again.whole:
            return ["It is another in each process.", *_read(alone.calls, ("identity",)), _INDEX]
        if alone.whole != later.whole:
            said = ["It depends on which sample its process fetched first: something is computed once, and kept."]
            return said + _of_first(alone)
        if alone.whole != usual.whole:
            said = [
                "It is another in other processes, but the same in those that are forked from one interpreter: it "
                "depends on hashes of text (as the order of a set does), on addresses in memory, or on what only the "
                "main process has."
            ]
            meanwhile = [f"Meanwhile {_listed(alone.changed)}."] if alone.changed else []
            return [*said, *_read(alone.calls, ("identity",)), *meanwhile, _INDEX]
        return []

    def _elsewhere(self, *before: int) -> Seen:
        """Fetch it in a process that has not imported anything of the user's yet."""
        start_forkserver()
        with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
            return pool.submit(self._fetch, self._make(), *before).result()

    def _undecided(self, seen: Seen, executor: str) -> list[str]:
        """Return lines with the causes that are left where every condition that was tried gave the usual digest."""
        said = [
            "Fetched alone it is always the same, so it depends on who computes it: on the worker's process or "
            "thread, on caches, or on what was fetched before."
        ]
        if executor == "thread":
            said.append(
                "Threads share the dataset: code that seeds a global generator itself, or changes attributes "
                "of the dataset, disturbs what another thread computes."
            )
        return said + _blamed(seen, ("entropy", "clock", "identity"))


def _kept(samples: Any) -> Any:
    return samples


def _read(calls: list[Call], kinds: tuple[str, ...]) -> list[str]:
    named = [call for call in calls if call.kind in kinds]
    return [f"It reads {call.what}, at {call.where}" for call in named[:_NAMED]]


def _listed(changes: list[Change]) -> str:
    names = [change.words for change in changes]
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _blamed(seen: Seen, kinds: tuple[str, ...]) -> list[str]:
    """Return lines that name what is to blame, generators first, and say what to do."""
    generators = [change for change in seen.changed if change.draws]
    others = [change for change in seen.changed if not change.draws]
    lines = [f"It draws from generators that are not seeded by position: {_listed(generators)}."] if generators else []
    read = _read(seen.calls, kinds)
    lines += read
    decided = generators or ("entropy" in kinds and any(call.kind == "entropy" for call in seen.calls))
    if others and not decided:
        said = "It depends on how many were fetched before, or which, if it uses what a fetch changes:"
        lines.append(f"{'Meanwhile' if read or 'identity' in kinds else said} {_listed(others)}.")
    if not (lines or "identity" in kinds):
        lines.append(
            "Nothing that its code names has changed: look at iterators, closures, open files and extensions, and at "
            "code that copies the state of a global generator, or puts it back after drawing."
        )
    return [*lines, _DRAW if decided else _INDEX]


def _of_first(seen: Seen) -> list[str]:
    """Return lines that name what a first fetch kept, or else the identity that was read, and say what to do."""
    lines = _read(seen.calls, ("identity",))
    if not seen.changed:
        return [*lines, _INDEX]
    return [*lines, f"The first fetch sets what later ones use: {_listed(seen.changed)}.", _FIRST]


@contextmanager
def _as_worker(dataset: Any) -> Iterator[None]:
    before = torch_worker._worker_info
    torch_worker._worker_info = torch_worker.WorkerInfo(id=1, num_workers=2, seed=1, dataset=dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = before


@contextmanager
def _on_one_thread(dataset: Any) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_SURROUNDINGS: dict[Callable[[Any], Any], tuple[str, str]] = {
    _as_worker: (
        "It depends on torch.utils.data.get_worker_info(): on which worker fetches it, of how many.",
        "Make the sample a function of its index alone; a worker is asked for other samples each time.",
    ),
    _on_one_thread: (
        "It depends on the number of threads that torch computes with, one in workers: sums are rounded differently.",
        "Call torch.set_num_threads(1) in the factory, or compute it in the training loop.",
    ),
}
