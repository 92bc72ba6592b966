"""`headrace plan`: one epoch's split over the ranks, as a table, and how often each sample is read."""

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.mixing import order_of_shards, show_shards
from headrace.errors import bad_value, whole_number
from headrace.plan import Blocks, Plan, Sequential, Shuffled
from headrace.plan.blocks import WINDOW
from headrace.types import Indices, Positions, Tail, World

MAX_SAMPLES, MAX_BATCHES = 2_000_000, 200_000
"""The most samples and batches, over all ranks, of an epoch that is evaluated in full and counted."""

MOST_SIZE, MOST_BATCH, MOST_STREAMS, MOST_64 = 10**15, 100_000, 10_000, 2**63 - 1
"""The largest values of options: what is beyond them would not end, or is no number of 64 bits."""

_A_RANK = "Count the samples of one rank and step."

_STEPS_SHOWN = 8, 4  # the first and the last steps of a long epoch
_RANKS_SHOWN = 4, 2  # likewise of a large world
_ALL_RANKS, _ALL_SAMPLES = 8, 4  # up to this number all are shown, whatever the width
_LISTED = 8  # samples named in a line below the table


@dataclass(frozen=True)
class RankStep:
    """What one rank reads at one step.

    Attributes:
        samples: Dataset indices, shape (n,).
        positions: Their places in the epoch's global order, shape (n,).
        pads: Whether each of them is a pad, shape (n,).
    """

    samples: Indices
    positions: Positions
    pads: np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Coverage:
    """How often an epoch reads each sample. Samples before the cursor count as read: the run before read them.

    Attributes:
        once: Samples read exactly once.
        more: The number of times that samples are read, by dataset index, if more than once.
        never: Dataset indices that are never read.
    """

    once: int
    more: dict[int, int]
    never: list[int]


@dataclass(frozen=True)
class EpochPlan:
    """One epoch of a plan, over all its ranks.

    Attributes:
        plan: The plan of rank 0.
        epoch: Which epoch.
        cursor: The position at which the run begins it.
    """

    plan: Plan
    epoch: int
    cursor: int

    @classmethod
    def make(
        cls,
        size: int,
        world_size: int,
        batch_size: int,
        tail: str,
        shuffle: bool,
        epoch: int,
        seed: int,
        cursor: int,
    ) -> "EpochPlan":
        """Make the plan from the command's options.

        Raises:
            ValueError: An option lies outside its range.
        """
        # Checked here: options that the plan names differently, or does not check.
        whole_number("--size", size, low=1, high=MOST_SIZE, fix="Count the dataset's samples.")
        whole_number("--batch-size", batch_size, low=1, high=MOST_BATCH, fix=_A_RANK)
        whole_number("--epoch", epoch, high=MOST_64, fix="Epochs count from 0.")
        order = Shuffled() if shuffle else Sequential()
        plan = Plan(order, size, batch_size, World(0, world_size), cast(Tail, tail), seed)
        plan.share(epoch, cursor)  # checks the cursor
        return cls(plan, epoch, cursor)

    @property
    def steps(self) -> int:
        """The number of steps of the rank that has most."""
        return self.plan.most_steps(self.epoch, self.cursor)

    @property
    def short(self) -> bool:
        """Whether the epoch is short enough to be evaluated in full."""
        samples = max(self.plan.length, self.plan.end(self.epoch, self.cursor))
        return samples <= MAX_SAMPLES and self.plan.world.size * max(1, self.steps) <= MAX_BATCHES

    def rank(self, rank: int) -> Plan:
        """Return one rank's plan."""
        return replace(self.plan, world=World(rank, self.plan.world.size))

    def rank_steps(self, ranks: list[int], steps: list[int]) -> list[list[RankStep | None]]:
        """Return what each of the ranks reads at each of the steps; None where a rank has no such step."""
        asked: list[list[Positions | None]] = []
        for rank in ranks:
            plan = self.rank(rank)
            has = plan.steps(self.epoch, self.cursor)
            asked.append([plan.positions(self.epoch, step, self.cursor) if step < has else None for step in steps])
        # The order is the same function on every rank: one call builds its tables once.
        parts = [one for row in asked for one in row if one is not None]
        samples = self.plan.indices(self.epoch, np.concatenate(parts)) if parts else np.empty(0, np.int64)
        pieces = iter(np.split(samples, np.cumsum([len(one) for one in parts])))
        return [
            [None if at is None else RankStep(next(pieces), at, at >= self.plan.samples) for at in row] for row in asked
        ]

    def every_step(self) -> list[list[RankStep]]:
        """Return what every rank reads at each of its steps.

        Raises:
            ValueError: The epoch is too long to be evaluated in full.
        """
        if not self.short:
            bad_value(
                "--size",
                self.plan.length,
                f"an epoch of at most {MAX_SAMPLES} samples and {MAX_BATCHES} batches, to print all of it",
                "Leave out --json to see its first and last steps.",
            )
        ranks, steps = list(range(self.plan.world.size)), list(range(self.steps))
        return [[one for one in row if one is not None] for row in self.rank_steps(ranks, steps)]

    def coverage(self, by_rank: list[list[RankStep]]) -> Coverage:
        """Count how often all ranks together read each sample."""
        before = self.plan.indices(self.epoch, np.arange(self.cursor))
        read = np.concatenate([before, *(one.samples for row in by_rank for one in row)])
        counts = np.bincount(read, minlength=self.plan.length)
        return Coverage(
            once=int((counts == 1).sum()),
            more={int(sample): int(counts[sample]) for sample in np.flatnonzero(counts > 1)},
            never=np.flatnonzero(counts == 0).tolist(),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the whole epoch in JSON's types; `pads` has the positions that are pads.

        Raises:
            ValueError: The epoch is too long to be evaluated in full.
        """
        by_rank = self.every_step()
        coverage = self.coverage(by_rank)
        return {
            "size": self.plan.length,
            "world_size": self.plan.world.size,
            "batch_size": self.plan.batch_size,
            "tail": self.plan.tail,
            "shuffle": self.plan.order.random,
            "epoch": self.epoch,
            "seed": self.plan.seed,
            "cursor": self.cursor,
            "steps": [len(row) for row in by_rank],
            "ranks": [
                {
                    "rank": rank,
                    "steps": [
                        {
                            "samples": one.samples.tolist(),
                            "positions": one.positions.tolist(),
                            "pads": one.positions[one.pads].tolist(),
                        }
                        for one in row
                    ],
                }
                for rank, row in enumerate(by_rank)
            ],
            "coverage": {
                "once": coverage.once,
                "more": {str(sample): times for sample, times in coverage.more.items()},
                "never": coverage.never,
            },
        }


@dataclass(frozen=True)
class OrderOfShards:
    """The order in which ranks read shards, and how it is looked at.

    Attributes:
        order: The order.
        labels: Each sample's label; None if there are none.
        seed: The seed of the order.
        world_size: Ranks.
        batch_size: Samples per rank and step.
    """

    order: Blocks
    labels: np.ndarray[Any, np.dtype[Any]] | None
    seed: int
    world_size: int
    batch_size: int

    @classmethod
    def make(
        cls,
        shards: str,
        streams: int | None,
        window: int | None,
        label: str | None,
        seed: int,
        world_size: int,
        batch_size: int,
    ) -> "OrderOfShards":
        """Make it from the command's options.

        Raises:
            OSError: A shard cannot be read.
            ValueError: An option lies outside its range.
        """
        whole_number("--batch-size", batch_size, low=1, high=MOST_BATCH, fix=_A_RANK)
        whole_number("--seed", seed, high=MOST_64)
        if streams is not None:
            whole_number("--streams", streams, low=1, high=MOST_STREAMS, fix="A multiple of the largest world will do.")
        order, labels = order_of_shards(shards, streams, WINDOW if window is None else window, label)
        return cls(order, labels, seed, world_size, batch_size)

    def show(self, console: Console) -> int:
        """Print it, and return the exit code."""
        show_shards(self.order, self.labels, self.seed, self.world_size, self.batch_size, console)
        return 0


def show(epoch_plan: EpochPlan, console: Console) -> None:
    """Print the epoch as a table of steps by ranks, and what it covers."""
    coverage = epoch_plan.coverage(epoch_plan.every_step()) if epoch_plan.short else None
    console.print(_summary(epoch_plan, coverage), soft_wrap=True)
    if epoch_plan.steps:
        console.print(_table(epoch_plan, console.width))
    if _pads(epoch_plan):
        console.print("* a pad: a sample read again, so that all ranks have equally many", style="dim")
    if coverage is None:
        limits = f"{MAX_SAMPLES:,} samples or {MAX_BATCHES:,} batches"
        console.print(f"coverage: not counted, as there are more than {limits}", soft_wrap=True)
        return
    more = [f"sample {sample} ({times} times in all)" for sample, times in coverage.more.items()]
    never = [f"sample {sample}" for sample in coverage.never]
    console.print(f"read once:  {_count(coverage.once, 'sample')}")
    console.print(f"read again: {_listed(more)}", soft_wrap=True)
    console.print(f"never read: {_listed(never)}", soft_wrap=True)


def _summary(epoch_plan: EpochPlan, coverage: Coverage | None) -> str:
    plan, cursor, pads = epoch_plan.plan, epoch_plan.cursor, _pads(epoch_plan)
    head = f"{_count(plan.length, 'sample')}, {_count(plan.world.size, 'rank')} x {plan.batch_size}"
    if cursor:
        head += f", from position {cursor:,}"
    said = [f"{pads:,} pad{'s' * (pads != 1)}" if pads else "no pads", _count(epoch_plan.steps, "step")]
    if coverage is not None:
        never, times = len(coverage.never), "at least once" if coverage.more else "once"
        said.insert(0, f"{plan.length - never:,} read, {never:,} never" if never else f"each sample {times}")
    return f"{head}: {', '.join(said[:-1])} (tail={plan.tail}, {said[-1]})"


def _table(epoch_plan: EpochPlan, width: int) -> Table:
    ranks = _ends(epoch_plan.plan.world.size, *_RANKS_SHOWN, whole=_ALL_RANKS)
    steps = _ends(epoch_plan.steps, *_STEPS_SHOWN)
    by_rank = epoch_plan.rank_steps(
        [one for one in ranks if one is not None], [one for one in steps if one is not None]
    )
    # The samples of a rank's step should fit on one line; 3 for a column's padding and edge, 1 for a blank.
    fit = (width // (len(ranks) + 1) - 3) // (len(str(epoch_plan.plan.length)) + 1)
    table = Table()
    table.add_column("step", justify="right", no_wrap=True)
    for rank in ranks:
        table.add_column("..." if rank is None else f"rank {rank}", overflow="fold")
    at = 0
    for step in steps:
        if step is None:
            left_out = epoch_plan.steps - sum(_STEPS_SHOWN)
            table.add_row(f"{left_out:,}\nleft out", *("..." for _ in ranks), style="dim")
            continue
        shown = iter(by_rank)
        table.add_row(str(step), *("..." if rank is None else _samples(next(shown)[at], fit) for rank in ranks))
        at += 1
    return table


def _samples(read: RankStep | None, fit: int) -> Text:
    """Return the samples as text; pads are dim and have a star."""
    if read is None:
        return Text("-", style="dim")
    text = Text()
    for number, place in enumerate(_ends(len(read.samples), max(1, fit - 2), 1, whole=max(fit, _ALL_SAMPLES))):
        text.append(" " * (number > 0))
        if place is None:
            text.append("...")
        elif read.pads[place]:
            text.append(f"{read.samples[place]}*", style="dim")
        else:
            text.append(str(read.samples[place]))
    return text


def _ends(count: int, first: int, last: int, whole: int = 0) -> list[int | None]:
    """Return 0 … count-1; None replaces the middle if `count` is above `whole` and at least two would be left out."""
    if count <= max(whole, first + last + 1):
        return list(range(count))
    return [*range(first), None, *range(count - last, count)]


def _pads(epoch_plan: EpochPlan) -> int:
    return max(0, epoch_plan.plan.end(epoch_plan.epoch, epoch_plan.cursor) - epoch_plan.plan.samples)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    left = len(names) - _LISTED
    return "; ".join(names[:_LISTED]) + (f" and {left:,} more" if left > 0 else "")
