"""Where a loader stands: its epoch, seed and plan; and the samplers that show it to frameworks."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from headrace import world
from headrace.delivery.reader import Observer
from headrace.errors import whole_number
from headrace.plan import Order, Plan
from headrace.types import PlanTask, Rows, Tail, Task, World


@dataclass
class Schedule:
    """The mutable part of a loader: what changes from epoch to epoch, and what is found out only at iteration.

    Attributes:
        dataset: The user's dataset.
        batch_size: Samples per rank and step.
        tail: The tail rule, resolved.
        distributed: The loader's argument.
        seed: The loader's argument.
        generator: Where a seed is drawn from if there is none.
        order: The resolved order; None for iterable datasets.
        parity: Whether a world of one rank gives torch's own batches.
        epoch: The epoch that the next `iter()` reads.
    """

    dataset: Any
    batch_size: int
    tail: Tail
    distributed: bool | World | None
    seed: int | None
    generator: torch.Generator | None
    order: Order | None
    parity: bool
    pads_last: bool = False
    epoch: int = 0
    _drawn_seed: int | None = None
    _plan: Plan | None = None
    _abandoned: str | None = None
    _warned: bool = False

    def world(self) -> World:
        """Return the world as it is now."""
        return world.resolve(self.distributed)

    def planned(self) -> bool:
        """Tell whether the next epoch follows a plan, rather than torch's own samplers."""
        return self.order is not None and (not self.parity or self.world().size > 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` reads."""
        self.epoch = whole_number("epoch", epoch, fix="Epochs count from 0.")
        self._abandoned = None

    def resolved_seed(self) -> int:
        """Return the seed: the user's; 0 in a world of several; else one drawn once from torch's generator."""
        if self.seed is not None:
            return self.seed
        if self.world().size > 1:
            return 0
        if self._drawn_seed is None:
            self._drawn_seed = draw_base_seed(self.generator)
        return self._drawn_seed

    def shape(self) -> Plan:
        """Return the plan but for its seed: enough for every length, and it draws nothing.

        Raises:
            ValueError: The dataset is empty, or the order does not fit it.
        """
        assert self.order is not None
        return Plan(
            order=self.order,
            length=len(self.dataset),
            batch_size=self.batch_size,
            world=self.world(),
            tail=self.tail,
            pads_last=self.pads_last,
        )

    def plan(self) -> Plan:
        """Return the plan for the dataset and the world as they are now; the same object while they stay.

        Raises:
            ValueError: The dataset is empty, its length has changed since the first plan, or the order does
                not fit it.
        """
        plan = replace(self.shape(), seed=self.resolved_seed())
        if self._plan is not None and plan.length != self._plan.length:
            raise ValueError(
                f"len(dataset) changed from {self._plan.length} to {plan.length} under a loader that follows a plan; "
                "the order of every epoch is a function of the length, and ranks that disagree on it would hang. "
                "Make a new DataLoader for the changed dataset."
            )
        if plan != self._plan:
            self._plan = plan
            if not plan.end():
                warnings.warn(
                    f'tail="drop" leaves no batch at all: {plan.samples} samples are fewer than one global batch of '
                    f"{plan.world.size} ranks x {plan.batch_size} = {plan.global_batch}. "
                    'Use a smaller batch_size, or tail="pad" or "exact".',
                    stacklevel=4,
                )
        assert self._plan is not None
        return self._plan

    def splits_stream(self) -> bool:
        """Tell whether an iterable dataset's samples are dealt to the ranks; only on demand."""
        return self.distributed is True or isinstance(self.distributed, World)

    def stream_share(self, length: int) -> int:
        """Count this rank's samples of an iterable dataset of `length` samples that is split."""
        world = self.world()
        if self.tail == "exact":
            return len(range(world.rank, length, world.size))
        return length // world.size if self.tail == "drop" else -(-length // world.size)

    def keys_stream(self) -> bool:
        """Tell whether an iterable dataset's randomness is keyed by (seed, epoch)."""
        return self.seed is not None or self.splits_stream()

    def stream_words(self) -> tuple[int, ...] | None:
        """Return what keys an iterable dataset's randomness, or None for torch's own worker seeds.

        Where the stream is split every rank must read the same one; where it is not, each should draw its
        own.
        """
        if self.splits_stream():
            return (self.resolved_seed(),)
        return None if self.seed is None else (self.seed, self.world().rank)

    def begin(self) -> None:
        """Warn, once, if the epoch about to begin is one that was broken off."""
        if self._abandoned and not self._warned:
            self._warned = True
            warnings.warn(
                f"epoch {self.epoch} was abandoned after {self._abandoned} and starts again at its first batch, since "
                f"an epoch advances only when it is finished. To go on with the next one call "
                f"loader.set_epoch({self.epoch + 1}) before iterating; to read all of this one, keep its iterator.",
                stacklevel=4,
            )
        self._abandoned = None

    def finish(self, epoch: int) -> None:
        """Advance, unless this epoch is not the current one (set_epoch, or a second reader of it)."""
        if self.epoch == epoch:
            self.epoch += 1
            self._abandoned = None

    def abandon(self, epoch: int, delivered: int, steps: int | None) -> None:
        """Note that a reader was dropped before its epoch was finished."""
        if self.epoch == epoch and delivered:
            self._abandoned = f"{delivered} of {steps} batches" if steps is not None else f"{delivered} batches"


def draw_base_seed(generator: torch.Generator | None) -> int:
    """Draw one 63-bit number from a generator, the global one if None, as each of torch's iterators does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class EpochPass(Observer):
    """One reader's way through an epoch of a schedule.

    Args:
        schedule: Advances when the pass is finished.
        plan: What is read; None for an iterable dataset, whose end shows only when it comes.
    """

    def __init__(self, schedule: Schedule, plan: Plan | None = None) -> None:
        self._schedule, self._plan = schedule, plan
        self.epoch = schedule.epoch
        self.steps = None if plan is None else plan.steps()
        self._delivered = 0

    def tasks(self) -> Iterator[Task]:
        """Yield the plan's tasks for the epoch."""
        epoch = self.epoch
        return (PlanTask(epoch, step) for step in range(self.steps or 0))

    def revised(self) -> Iterator[Task] | None:
        """Return other tasks if the epoch was set between `iter()` and the first batch, as Lightning does."""
        if self.epoch == self._schedule.epoch:
            return None
        self.epoch = self._schedule.epoch
        return self.tasks()

    def delivering(self, count: int) -> None:
        """Advance the epoch with its last batch: who stops there has finished it."""
        self._delivered = count
        if count == self.steps:
            self._schedule.finish(self.epoch)

    def ended(self, finished: bool) -> None:
        """Advance the epoch, or note that it was broken off."""
        if finished:
            self._schedule.finish(self.epoch)
        else:
            self._schedule.abandon(self.epoch, self._delivered, self.steps)


class AutoSampler(DistributedSampler[int]):
    """The sampler of a loader that was given none, in the classes that frameworks look for.

    Being a `DistributedSampler`, it keeps Lightning and Ray Train from sharding the loader once more; rank
    and world are those at the time of asking. Iterating it gives this rank's dataset indices for the current
    epoch.
    """

    _torch_sampler: type[RandomSampler] | type[SequentialSampler]

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        # What torch's samplers keep; their own __init__ would resolve the world now.
        self.dataset = self.data_source = schedule.dataset
        self.replacement, self.generator = False, schedule.generator
        self._num_samples: int | None = None
        self.drop_last = schedule.tail == "drop"
        self.shuffle = self._torch_sampler is RandomSampler

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """World size."""
        return self._schedule.world().size

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This process's rank."""
        return self._schedule.world().rank

    @property
    def seed(self) -> int:  # type: ignore[override]
        """The seed of the shuffle."""
        return self._schedule.resolved_seed()

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch that the next `iter()` reads."""
        return self._schedule.epoch

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Samples that this rank reads in an epoch."""
        if not self._schedule.planned():
            return len(self.data_source)
        return self._schedule.shape().share()

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Samples that all ranks read in an epoch, pads included."""
        return self._schedule.shape().end() if self._schedule.planned() else len(self.data_source)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; needed only by who wants another than the next."""
        self._schedule.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        if not self._schedule.planned():
            return self._torch_sampler.__iter__(self)  # type: ignore[arg-type]
        plan, epoch = self._schedule.plan(), self.epoch
        return (index for step in range(plan.steps()) for index in plan.batch(epoch, step).tolist())

    def rows(self, batch_size: int, drop_last: bool) -> Iterator[Rows]:
        """Yield the same indices as torch's sampler and batch sampler, and draw the same numbers, but in bulk."""
        length = len(self.data_source)
        index: Rows = range(length)
        if self.shuffle:
            generator = self.generator
            if generator is None:
                generator = torch.Generator()
                generator.manual_seed(draw_base_seed(None))
            index = torch.randperm(length, generator=generator)
        whole = length - length % batch_size
        for start in range(0, whole, batch_size):
            yield index[start : start + batch_size]
        if self.shuffle and self.generator is not None:
            torch.randperm(length, generator=self.generator)  # torch's sampler draws once more, in vain
        if whole < length and not drop_last:
            yield index[whole:]

    def __len__(self) -> int:
        return self.num_samples


class AutoRandomSampler(AutoSampler, RandomSampler):
    """The automatic sampler of a loader whose order changes with the epoch."""

    _torch_sampler = RandomSampler


class AutoSequentialSampler(AutoSampler, SequentialSampler):
    """The automatic sampler of a loader whose order is always the same."""

    _torch_sampler = SequentialSampler


def install(schedule: Schedule, batch_sampler: BatchSampler | None) -> AutoSampler:
    """Make the automatic sampler of a schedule and put it into torch's batch sampler, if there is one."""
    assert schedule.order is not None
    sampler = (AutoRandomSampler if schedule.order.random else AutoSequentialSampler)(schedule)
    if batch_sampler is not None:
        batch_sampler.sampler = sampler
        # Hugging Face's Trainer looks for it one level above the sampler when it skips batches.
        batch_sampler.set_epoch = sampler.set_epoch  # type: ignore[attr-defined]
    return sampler
