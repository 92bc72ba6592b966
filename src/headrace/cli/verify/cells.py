"""The cells of `headrace verify`: each reads the same epochs in another way, and records the samples' digests."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import forkserver
from typing import Any

import torch.utils.data

from headrace.cli.factory.load import FactoryFailed
from headrace.cli.factory.remake import CannotRemake, remade
from headrace.cli.factory.worded import worded
from headrace.cli.verify.digest import DigestingCollate, Fold, SampleDigest
from headrace.loader import DataLoader
from headrace.loader.options import CELLS
from headrace.plan import Order, Plan
from headrace.progress.source import Kind
from headrace.types import Tail, World

EXECUTORS = ("inline", "thread", "fork", "spawn")
WORKERS = (1, 2, 4)
WORLDS = (1, 2, 3, 4)
RESUMES = ("0", "1", "mid", "last-1", "last")
NO_RESUME = "-"
_COVERED_RESUMES = ("0", "last", "last-1", "1", "mid")  # the middle of the epoch meets the larger worlds

_PROCESSES = ("fork", "spawn")

_SPAWNED = 2
"""The most workers that a cell spawns one by one. More workers are forked from one spawned interpreter, before it has
imported anything of the user's: each spawned worker imports torch, which takes two seconds of CPU."""

_FEWEST_STEPS = 16
"""The fewest steps of an epoch that has as many samples: batches are made small, so that four workers are busy."""

_KILLED_S = 10.0
"""How long a killed worker may take to end, in seconds."""

_OUR_OWN = ("This DataLoader will create", CELLS)
_UNPICKLABLE = "headrace: the dataset, collate_fn and worker_init_fn must be picklable"

Digests = dict[tuple[int, int], SampleDigest]
"""The digests of the samples that were read, by epoch and global position."""


class CannotVerify(Exception):
    """The factory, or the loader that it makes, cannot be verified; the text says why."""


class CellFailed(Exception):
    """A cell did not read the samples that the plan gives, or its state is wrong; the text has the details."""


@dataclass(frozen=True)
class Cell:
    """One way to read an epoch.

    Attributes:
        executor: Where the work runs: "inline", "thread", "fork" or "spawn".
        workers: How many workers each rank has; 1 inline.
        world: How many ranks, all simulated in this process.
        resume: The step after which every rank stops, and goes on in a new loader from its state; "-" for none.
        kill: Whether a worker is killed after the first batch.
    """

    executor: str = "inline"
    workers: int = 1
    world: int = 1
    resume: str = NO_RESUME
    kill: bool = False

    @property
    def kind(self) -> str:
        """The executor, or how its processes are started."""
        crowded = self.executor == "spawn" and self.workers * self.world > _SPAWNED
        return "forkserver" if crowded else self.executor

    @property
    def persistent(self) -> bool:
        """Whether the same workers read all epochs until a resume, and have begun with another epoch."""
        return self.executor != "inline" and (self.resume == "last" or (self.kill and self.resume == NO_RESUME))

    def __str__(self) -> str:
        kept = " that persist" if self.persistent else ""
        workers = "" if self.executor == "inline" else f", {self.workers} worker{'s' * (self.workers > 1)}{kept}"
        resume = "" if self.resume == NO_RESUME else f", resumed at step {self.resume}"
        return f"{self.kind}{workers}, world of {self.world}{resume}{', a worker killed' * self.kill}"


REFERENCE = Cell()


def every_cell(executors: Sequence[str], workers: Sequence[int], worlds: Sequence[int], kills: bool) -> list[Cell]:
    """Return every combination."""
    cells = []
    for executor in executors:
        kinds = (False, True) if kills and executor in _PROCESSES else (False,)
        counts = (1,) if executor == "inline" else tuple(workers)
        cells += [Cell(executor, *rest) for rest in product(counts, worlds, RESUMES, kinds)]
    return cells


def covering_cells(executors: Sequence[str], workers: Sequence[int], worlds: Sequence[int], kills: bool) -> list[Cell]:
    """Return cells that combine each executor with each number of workers, each world and each place of resuming.

    Large numbers of workers come with small worlds, since each rank starts its own workers.
    """
    rows = max(len(workers), len(worlds), len(RESUMES))
    falling, rising = sorted(workers, reverse=True), sorted(worlds)
    falling += [falling[-1]] * (rows - len(falling))
    rising = [rising[0]] * (rows - len(rising)) + rising
    resumes = [*_COVERED_RESUMES, *[NO_RESUME] * (rows - len(RESUMES))]
    cells = []
    for executor in executors:
        counts = [1] * rows if executor == "inline" else falling
        cells += [Cell(executor, *row) for row in zip(counts, rising, resumes, strict=True)]
        if kills and executor in _PROCESSES:
            cells.append(Cell(executor, max(one for one in workers if one <= 2 or one == min(workers)), kill=True))
    return cells


@dataclass
class Outcome:
    """The result of a cell.

    Attributes:
        cell: The cell.
        digests: The digests of the samples that it read.
        error: What went wrong, in words; "" if nothing did.
        skipped: Why it could not run, in words; "" if it ran.
    """

    cell: Cell
    digests: Digests = field(default_factory=dict)
    error: str = ""
    skipped: str = ""

    def fold(self) -> str:
        """Return one digest of all samples in the order of their positions."""
        fold = Fold()
        for (epoch, position), sample in sorted(self.digests.items()):
            fold.add(epoch, position, sample.whole)
        return fold.hex()


class Subject:
    """The loader to be verified: the user's factory makes it anew for each cell, and its options are changed for that.

    Args:
        factory: Makes the loader.
        epochs: How many epochs each cell reads.
        samples: The most positions of an epoch that are read.

    Raises:
        CannotVerify: The loader does not follow a plan.
    """

    def __init__(self, factory: Callable[[], Any], epochs: int, samples: int) -> None:
        self.factory = factory
        self.epochs = epochs
        loader = self.loader()
        self.order: Order = loader._source.order
        self.seeded = loader.seed is not None
        self.batched = loader.batch_size is not None
        self.tail: Tail = "exact" if loader.tail == "exact" else "pad"
        try:
            self.plan = Plan(self.order, len(loader.dataset), 1, World(), self.tail, loader.seed or 0)
        except ValueError as error:
            raise CannotVerify(str(error)) from error
        self.limit = min(samples, self.plan.samples)
        self.batch_size = max(1, min(loader.batch_size or 1, self.limit // _FEWEST_STEPS))

    def loader(self) -> Any:
        """Call the factory.

        Raises:
            CannotVerify: It raised, or made no loader that can be verified.
        """
        try:
            loader = self.factory()
        except FactoryFailed as error:
            raise CannotVerify(str(error)) from error
        check(loader)
        return loader

    def plan_of(self, cell: Cell, rank: int) -> Plan:
        """Return a rank's plan in a cell: global batches of about the same size for any world."""
        batch_size = max(1, self.batch_size // cell.world) if self.batched else 1
        batch_size = self.order.per_rank or batch_size  # which an order may cut itself
        return replace(self.plan, batch_size=batch_size, world=World(rank, cell.world))

    def run(self, cell: Cell) -> Outcome:
        """Read the epochs as the cell says."""
        outcome = Outcome(cell)
        try:
            _Run(self, cell, outcome.digests).read_epochs()
        except CannotVerify:
            raise
        except CellFailed as failure:
            outcome.error = str(failure)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises
            notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_UNPICKLABLE)]
            if cell.executor == "spawn" and notes:
                outcome.skipped = notes[0].removeprefix("headrace: ")
            else:
                outcome.error = worded(error)
        return outcome

    def variant(self, loader: Any, cell: Cell, rank: int) -> Any:
        """Return a loader like the factory's, but with the options of one rank of a cell.

        Raises:
            CannotVerify: Its class does not take the arguments that must change, or does not keep one that it needs.
        """
        plan, processes = self.plan_of(cell, rank), cell.executor in _PROCESSES
        changed = {
            "shuffle": None,
            "sampler": None,
            "batch_sampler": None,
            "order": self.order,
            "batch_size": (plan.batch_size if self.order.per_rank is None else 1) if self.batched else None,
            "drop_last": False,
            "tail": self.tail,
            "seed": plan.seed,
            "distributed": plan.world,
            "collate_fn": DigestingCollate(loader.collate_fn, self.batched),
            "num_workers": 0 if cell.executor == "inline" else cell.workers,
            "executor": "process" if processes else cell.executor,
            "multiprocessing_context": cell.kind if processes else None,
            "max_workers": None,
            "prefetch_factor": None,
            "persistent_workers": cell.persistent,
            "in_order": True,
            "pin_memory": False,
        }
        changed |= {"timeout": 0} if cell.executor == "inline" else {}
        changed |= {} if loader.epoch_samples is None else {"epoch_samples": None}  # they are in the order
        try:
            return remade(loader, changed, optional=("shuffle", "pin_memory", "max_workers"))
        except CannotRemake as error:
            raise CannotVerify(
                f"{error}: a loader is verified by making others like it with other arguments. "
                "Let the factory return a headrace.DataLoader itself."
            ) from error


def check(loader: Any) -> None:
    """Refuse everything but a loader that follows a plan.

    Raises:
        CannotVerify: The text says what it is, and why it cannot be verified.
    """
    kind = f"{type(loader).__module__}.{type(loader).__qualname__}"
    if not isinstance(loader, DataLoader):
        if isinstance(loader, torch.utils.data.DataLoader):
            raise CannotVerify(
                f"the factory returned torch's own DataLoader ({kind}), whose batches depend on the number of workers "
                "and ranks. Import DataLoader from headrace."
            )
        raise CannotVerify(f"the factory returned a {kind}: expected a headrace.DataLoader.")
    if loader._source.kind in (Kind.STREAM, Kind.DATAPIPE):
        raise CannotVerify(
            f"the dataset, a {type(loader.dataset).__qualname__}, is iterable: what a worker reads of it depends on "
            "how many workers and ranks there are. Only map-style datasets can be verified."
        )
    if loader._source.kind is Kind.SAMPLER:
        deciding = loader.batch_sampler if loader.batch_size is None and loader.batch_sampler else loader.sampler
        raise CannotVerify(
            f"the loader was given a sampler of its own ({type(deciding).__qualname__}), which alone decides what is "
            "read, in any world. Leave it out, or pass an order= such as headrace.Weighted(weights)."
        )


class _Run:
    """Reads the epochs of one cell step by step, on all ranks at each step, as ranks of a real run do."""

    def __init__(self, subject: Subject, cell: Cell, digests: Digests) -> None:
        self._subject, self._cell, self._digests = subject, cell, digests
        self._plans = [subject.plan_of(cell, rank) for rank in range(cell.world)]
        self._to_kill = cell.kill

    def read_epochs(self) -> None:
        loaders = self._loaders()
        if self._cell.persistent:
            self._begin_elsewhere(loaders)
        limit, steps = self._subject.limit, self._steps(0, 0)
        for epoch in range(self._subject.epochs):
            cursor = 0
            if limit < self._subject.plan.samples:
                for loader in loaders if epoch else ():
                    loader.set_epoch(epoch)
            if epoch == 0 and self._cell.resume != NO_RESUME:
                done = {"0": 0, "1": min(1, steps), "mid": steps // 2, "last-1": steps - 1, "last": steps}
                loaders, cursor = self._resumed(loaders, done[self._cell.resume])
            self._read(loaders, epoch, cursor, self._steps(epoch, cursor))
            lost = [position for position in range(limit) if (epoch, position) not in self._digests]
            if lost:
                raise CellFailed(f"{len(lost)} samples of epoch {epoch} were never read; the first is at {lost[0]}")

    def _begin_elsewhere(self, loaders: list[Any]) -> None:
        """Let workers that persist begin with an epoch that is not compared."""
        for loader in loaders:
            loader.set_epoch(self._subject.epochs)
            with _ended([iter(loader)]) as (reader,):
                next(reader, None)
            loader.set_epoch(0)

    def _steps(self, epoch: int, cursor: int) -> int:
        """Count the steps from a cursor on in which samples are read that count."""
        plan, limit = self._plans[0], self._subject.limit
        if plan.even:
            return -(-(limit - cursor) // plan.global_batch)
        steps, reached = 0, cursor
        while reached < limit:
            reached, steps = plan.cursor_after(epoch, steps, cursor), steps + 1
        return steps

    def _loaders(self) -> list[Any]:
        loader = self._subject.loader()
        return [self._subject.variant(loader, self._cell, rank) for rank in range(self._cell.world)]

    def _resumed(self, loaders: list[Any], steps: int) -> tuple[list[Any], int]:
        """Read the first steps; return new loaders with the old ones' state, and the cursor at which they begin."""
        plan = self._plans[0]
        self._read(loaders, 0, 0, steps)
        states = [loader.state_dict() for loader in loaders]
        for rank, (state, other) in enumerate(zip(states, self._plans, strict=True)):
            if other.steps(0) == plan.steps(0) and state != states[0]:
                raise CellFailed(f"after step {steps} rank 0's state is {states[0]}, but rank {rank}'s is {state}")
        cursor = plan.cursor_after(0, steps - 1) if steps else 0
        stands = states[0]["epoch"] * plan.samples + states[0]["samples"]
        if stands != cursor:
            raise CellFailed(f"after step {steps} the state stands at sample {stands} instead of {cursor}")
        loaders = self._loaders()
        for loader in loaders:
            loader.load_state_dict(dict(states[0]))
        return loaders, cursor

    def _read(self, loaders: list[Any], epoch: int, cursor: int, steps: int) -> None:
        """Read a number of steps of an epoch on all ranks that have them."""
        if steps <= 0:
            return
        with _ended([iter(loader) for loader in loaders]) as readers:
            for step in range(steps):
                for plan, reader in zip(self._plans, readers, strict=True):
                    if step < plan.steps(epoch, cursor):
                        self._keep(plan.positions(epoch, step, cursor).tolist(), next(reader, None), epoch)
                if self._to_kill:
                    self._to_kill = False
                    _kill(readers[0]._workers[0])
            if steps >= max(plan.steps(epoch, cursor) for plan in self._plans):
                # A rank finds that the epoch has ended when it asks for more.
                more = [rank for rank, reader in enumerate(readers) if next(reader, None) is not None]
                if more:
                    raise CellFailed(f"rank {more[0]} got a batch after its last step of epoch {epoch}")

    def _keep(self, positions: list[int], batch: list[SampleDigest] | None, epoch: int) -> None:
        if batch is None:
            raise CellFailed(f"epoch {epoch} ended before position {positions[0]}")
        if len(batch) != len(positions):
            raise CellFailed(f"a batch of {len(batch)} samples came where {len(positions)} belong")
        for position, sample in zip(positions, batch, strict=True):
            if position < self._subject.limit:
                if (epoch, position) in self._digests:
                    raise CellFailed(f"the sample at position {position} of epoch {epoch} was read twice")
                self._digests[epoch, position] = sample


def start_forkserver() -> None:
    """Start the interpreter that processes are forked from. It imports torch; this function does not wait for that."""
    forkserver.set_forkserver_preload(["headrace.executors.process.pool"])
    forkserver.ensure_running()


@contextmanager
def _ended(readers: list[Any]) -> Iterator[list[Any]]:
    """End readers and their workers at the end of the block."""
    try:
        yield readers
    finally:
        for reader in readers:
            reader._shutdown_workers()


def _kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(_KILLED_S)
    if process.exitcode is None:
        raise CellFailed(f"worker {process.pid} still lives {_KILLED_S:.0f} s after it was killed")


@contextmanager
def collect_warnings() -> Iterator[dict[str, int]]:
    """Collect the texts of warnings, and how often each came, instead of showing them.

    Torch's warning about more workers than CPUs is left out: the cells ask for them, not the user.
    """
    counted: dict[str, int] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield counted
        finally:
            for one in caught:
                if str(one.message).startswith(_OUR_OWN):
                    continue
                counted[str(one.message)] = counted.get(str(one.message), 0) + 1
