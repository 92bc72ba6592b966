"""Samplers that show a loader's plan to frameworks, and draw torch's own order where there is no plan."""

import warnings
from collections.abc import Iterator

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from headrace.loader import accelerate
from headrace.progress.schedule import Schedule
from headrace.progress.source import draw_base_seed
from headrace.types import Rows


class AutoSampler(DistributedSampler[int]):
    """The sampler of a loader that was given none, a subclass of the classes that frameworks look for.

    Being a `DistributedSampler`, it keeps Lightning and Ray Train from sharding the loader once more; rank
    and world are those at the time of asking. Iterating it gives this rank's dataset indices for the current
    epoch.
    """

    _torch_sampler: type[RandomSampler] | type[SequentialSampler]

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        # The attributes of torch's samplers. Their own __init__ would resolve the world now.
        self.dataset = self.data_source = schedule.source.dataset
        self.replacement, self.generator = False, schedule.source.generator
        self._num_samples: int | None = None
        self.drop_last = schedule.source.tail == "drop"
        self.shuffle = self._torch_sampler is RandomSampler

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """World size."""
        return self._schedule.source.world().size

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This process's rank."""
        return self._schedule.source.world().rank

    @property
    def seed(self) -> int:  # type: ignore[override]
        """The seed of the shuffle."""
        return self._schedule.source.resolved_seed()

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch that the next `iter()` reads."""
        return self._schedule.epoch

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Samples that this rank reads in an epoch."""
        if not self._schedule.source.planned():
            return len(self.data_source)
        return self._schedule.source.shape().share(self.epoch)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Samples that all ranks read in an epoch, pads included."""
        return (
            self._schedule.source.shape().end(self.epoch) if self._schedule.source.planned() else len(self.data_source)
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, for a framework that does so through the sampler."""
        self._schedule.follow_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        if not self._schedule.source.planned():
            return self._torch_sampler.__iter__(self)  # type: ignore[arg-type]
        if accelerate.in_use():
            warnings.warn(
                "a DataLoader of torch's reads this loader's sampler. Accelerate's function prepare_data_loader splits "
                "this rank's share once more, and its function skip_first_batches does not mark the end: use the "
                "methods of Accelerator of these names.",
                stacklevel=3,
            )
        plan, epoch = self._schedule.source.plan(), self.epoch
        return (index for step in range(plan.steps(epoch)) for index in plan.batch(epoch, step).tolist())

    def rows(self, batch_size: int, drop_last: bool) -> Iterator[Rows]:
        """Yield the indices of torch's sampler and batch sampler as whole rows, with the same random draws."""
        length = len(self.data_source)
        index: Rows = range(length)
        if self.shuffle:
            generator = self.generator
            if generator is None:
                generator = torch.Generator()
                generator.manual_seed(draw_base_seed(None))
            index = torch.randperm(length, generator=generator)
        whole = length - length % batch_size
        starts = range(0, whole, batch_size)
        if self.shuffle:
            yield from (index[start : start + batch_size] for start in starts)
        else:
            yield from map(range, starts, range(batch_size, whole + 1, batch_size))
        if self.shuffle and self.generator is not None:
            torch.randperm(length, generator=self.generator)  # torch's sampler draws once more, and uses none of it
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


class AutoBatches(BatchSampler):
    """The batch sampler of a loader whose order cuts the batches, for frameworks that read it, or make one anew."""

    def __iter__(self) -> Iterator[list[int]]:
        if not isinstance(self.sampler, AutoSampler):
            return super().__iter__()
        schedule = self.sampler._schedule
        plan, epoch = schedule.source.plan(), schedule.epoch
        return (plan.batch(epoch, step).tolist() for step in range(plan.steps(epoch)))

    def __len__(self) -> int:
        if not isinstance(self.sampler, AutoSampler):
            return super().__len__()
        schedule = self.sampler._schedule
        return schedule.source.shape().steps(schedule.epoch)


def install(schedule: Schedule, batch_sampler: BatchSampler | None) -> tuple[AutoSampler, BatchSampler | None]:
    """Make the automatic sampler of a schedule; put it into torch's batch sampler, if there is one; return both."""
    assert schedule.source.order is not None
    sampler = (AutoRandomSampler if schedule.source.order.random else AutoSequentialSampler)(schedule)
    if batch_sampler is not None:
        if schedule.source.order.per_rank is not None:
            batch_sampler = AutoBatches(sampler, 1, batch_sampler.drop_last)
        batch_sampler.sampler = sampler
        # Hugging Face's Trainer looks for it one level above the sampler when it skips batches.
        batch_sampler.set_epoch = sampler.set_epoch  # type: ignore[attr-defined]
    return sampler, batch_sampler
