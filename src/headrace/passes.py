"""One reader's way through an epoch: what it asks for, and the state that another reader may go on from."""

import base64
import copy
import io
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from pickle import UnpicklingError
from typing import Any

import torch

from headrace.delivery.reader import Delivered, Observer
from headrace.errors import StateMismatch, whole_number
from headrace.plan import Plan
from headrace.plan.state import State, mismatch
from headrace.randomness import Generators, callers_generators_kept
from headrace.schedule import Schedule
from headrace.types import PlanTask, StreamStart, Task
from headrace.work import has_state


class Pass(Observer, ABC):
    """A pass: it counts what is delivered, advances the schedule at its end, and says where that leaves the loader.

    Args:
        schedule: Whose epoch is read.
        conditions: What another pass must have in common with this one to go on from its rank-local state.
    """

    _local_only = True
    _remedy = "Elsewhere than under a plan a state belongs to one rank, and to one way of cutting its batches."

    def __init__(self, schedule: Schedule, **conditions: Any) -> None:
        self._schedule = schedule
        self._conditions = conditions
        self._over = False
        self._beyond: set[int] = set()
        self._begin()
        schedule.latest = self

    def _begin(self) -> None:
        """Take the start that the schedule has now.

        Raises:
            StateMismatch: Only another rank, or a loader with other options, can go on from there.
        """
        self.start = start = self._schedule.start
        self.local: dict[str, Any] = {}
        if start.rank_local:
            try:
                self.local = dict(json.loads(start.rank_local))
                for name, mine in self._conditions.items():
                    if self.local[name] != mine:
                        raise mismatch(name, self.local[name], mine, self._remedy)
                self._beyond = {whole_number("beyond", number) for number in self.local.get("beyond", ())}
                self._take()
            except StateMismatch:
                raise
            except (KeyError, IndexError, TypeError, ValueError, RuntimeError, UnpicklingError, zlib.error) as error:
                raise StateMismatch(f'state["rank_local"] was changed by hand, or damaged: {error!r}') from error
        elif start.samples and self._local_only:
            raise StateMismatch(
                'state["rank_local"] is empty: it was changed by hand, or saved by another kind of loader.'
            )
        self._base = self._schedule.state_at(start.epoch, start.samples, start.rank_local)
        self._count = 0  # batches delivered since
        # Tasks done without a gap, counted from the start, and those done beyond one.
        self._done = 0
        self._skipped = sorted(self._beyond)

    def _take(self) -> None:
        """Take what the state holds for this kind of pass."""

    @property
    def resumed(self) -> bool:
        """Whether the pass goes on in the middle of an epoch."""
        return bool(self.start.samples or self.local)

    def delivering(self, delivered: Delivered) -> None:
        """Count a batch."""
        self._count = delivered.nth
        number = delivered.number
        for skipped in self._skipped:  # in the numbers of the start, which counts them too
            number += skipped <= number
        if number > self._done:
            self._beyond.add(number)
        elif number == self._done:
            self._done += 1
            while self._beyond and self._done in self._beyond:
                self._beyond.remove(self._done)
                self._done += 1

    def ended(self, finished: bool) -> None:
        """Advance the epoch."""
        if finished:
            self._over = True
            self._schedule.finish(self.start)

    def state(self) -> State:
        """Return the place after the last batch that was delivered."""
        if self._over:
            return self._at(1, 0)
        return self._reached() if self._count else self._base

    @abstractmethod
    def _reached(self) -> State:
        """Return the place in the middle of the epoch."""

    def _at(self, epochs: int, samples: int, **local: Any) -> State:
        rank_local = json.dumps(self._conditions | local) if local else ""
        return replace(self._base, epoch=self.start.epoch + epochs, samples=samples, rank_local=rank_local)


class PlanPass(Pass):
    """A pass over a plan.

    Args:
        schedule: Whose epoch is read.
        plan: What is read.
        in_order: Whether batches come in the order of their steps; else a state belongs to this rank alone.
    """

    _local_only = False
    _remedy = "Where batches came in any order a state belongs to one rank; with in_order=True it does not."

    def __init__(self, schedule: Schedule, plan: Plan, in_order: bool) -> None:
        self._plan, self._in_order = plan, in_order
        super().__init__(schedule, rank=plan.world.rank, world_size=plan.world.size, batch_size=plan.batch_size)

    def _begin(self) -> None:
        super()._begin()
        self.steps = self._plan.steps(self.start.samples)

    def tasks(self) -> Iterator[Task]:
        """Yield the plan's tasks for the rest of the epoch."""
        epoch, cursor, done = self.start.epoch, self.start.samples, frozenset(self._beyond)
        return (PlanTask(epoch, step, cursor) for step in range(self.steps) if step not in done)

    def revised(self) -> Iterator[Task] | None:
        """Return other tasks if the epoch was set between `iter()` and the first batch, as Lightning does."""
        if self.start is self._schedule.start:
            return None
        self._begin()
        return self.tasks()

    def delivering(self, delivered: Delivered) -> None:
        """Advance the epoch with its last batch: who stops there has finished it."""
        super().delivering(delivered)
        if self._done == self.steps:
            self._schedule.finish(self.start)

    def ended(self, finished: bool) -> None:
        """Advance the epoch, or note that it was broken off."""
        super().ended(finished)
        if not finished and self._count:
            self._schedule.abandon(self.start, f"{self._count} of {self.steps} batches")

    def _reached(self) -> State:
        cursor = self._plan.cursor_after(self._done - 1, self.start.samples) if self._done else self.start.samples
        if cursor == self._plan.samples:
            return self._at(1, 0)
        if self._in_order:
            return self._at(0, cursor)
        return self._at(0, cursor, beyond=sorted(step - self._done for step in self._beyond))


class SamplerPass(Pass):
    """A pass over what a sampler decides: torch's, or the user's.

    Its state belongs to this rank. A sampler that has `state_dict` and `load_state_dict` is asked; any other is begun
    again with the random generators as they were, and the batches that were delivered are drawn from it, not loaded.

    Args:
        schedule: Whose epoch is read.
        samplers: What may have a state of its own, outermost first.
        generators: The user's own, which samplers draw from.
        length: Counts the pass's batches; it may raise TypeError.
    """

    def __init__(
        self,
        schedule: Schedule,
        samplers: Sequence[Any],
        generators: Sequence[torch.Generator],
        length: Callable[[], int],
    ) -> None:
        self._packed = ""
        self._behind = 0
        self._sampler_state: Any = None
        world = schedule.world()
        super().__init__(schedule, rank=world.rank, world_size=world.size, batch_size=schedule.batch_size)
        self._stateful = next((one for one in samplers if has_state(one)), None)
        self._epochs = next((one for one in samplers if _has_epoch(one)), None)
        self._generators = generators
        self._length = length
        self._samples = self.start.samples
        self._drawn: dict[int, Any] = {}  # the sampler's state after each batch that is on its way
        self._began: tuple[Generators, list[torch.Tensor]]

    def _take(self) -> None:
        self._behind = whole_number("batches", self.local["batches"])
        self._packed = self.local["generators"]
        shared, own = _unpacked(self._packed)
        self._began = Generators(shared), own
        self._sampler_state = _unpacked(self.local["sampler"]) if "sampler" in self.local else None

    @contextmanager
    def as_it_began(self) -> Iterator[None]:
        """Give the generators that samplers draw from the states that they had when the epoch began."""
        if not self._packed:
            self._began = Generators(), [one.get_state() for one in self._generators]
            yield
            return
        shared, own = self._began
        if len(own) != len(self._generators):
            raise mismatch("generators", len(own), len(self._generators), "Give the loader and its sampler the same.")
        with callers_generators_kept():
            shared.restore()
            for generator, state in zip(self._generators, own, strict=True):
                generator.set_state(state)
            if self._epochs is not None and "sampler_epoch" in self.local:
                self._epochs.set_epoch(self.local["sampler_epoch"])
            yield

    def drawn(self, draw: Callable[[], Iterator[Task]]) -> Iterator[Task]:
        """Return what `draw` returns, once the sampler has its state."""
        if self._stateful is not None and self._sampler_state is not None:
            self._stateful.load_state_dict(self._sampler_state)
        return draw()

    def rest(self, tasks: Iterator[Task]) -> Iterator[Task]:
        """Yield the tasks that are left of the epoch's."""
        done = frozenset(self._beyond)
        for _ in range(0 if self._sampler_state is not None else self._behind):
            next(tasks, None)
        if self._stateful is not None:
            tasks = self._noted(tasks)
        if done:
            tasks = (task for number, task in enumerate(tasks) if number not in done)
        if self.resumed:  # what a sampler draws at its first batch it draws here, from the generators as they were
            tasks = chain(list(islice(tasks, 1)), tasks)
        return tasks

    def _noted(self, tasks: Iterator[Task]) -> Iterator[Task]:
        assert self._stateful is not None
        for number, task in enumerate(tasks):
            self._drawn[number] = copy.deepcopy(self._stateful.state_dict())
            yield task

    def delivering(self, delivered: Delivered) -> None:
        """Count a batch and its samples."""
        before = self._done
        super().delivering(delivered)
        self._samples += delivered.samples
        for number in range(before - 1, self._done - 1):
            self._drawn.pop(number, None)

    def _reached(self) -> State:
        try:
            if self._behind + self._done == self._length():
                return self._at(1, 0)
        except (TypeError, NotImplementedError):  # a sampler without a length; its end shows when it comes
            pass
        if not self._packed:
            shared, own = self._began
            self._packed = _packed((shared.packed(), own))
        local = {"batches": self._behind + self._done, "generators": self._packed}
        if self._beyond:
            local["beyond"] = sorted(number - self._done for number in self._beyond)
        if self._done and self._stateful is not None:
            local["sampler"] = _packed(self._drawn[self._done - 1])
        elif "sampler" in self.local:
            local["sampler"] = self.local["sampler"]
        if self._epochs is not None:
            local["sampler_epoch"] = self._epochs.epoch
        return self._at(0, self._samples, **local)


class StreamPass(Pass):
    """A pass over an iterable dataset, of which each worker reads a copy.

    Its state belongs to this rank and as many workers. A dataset that has `state_dict` and `load_state_dict` is asked
    for its state after each batch; any other is read again from its beginning, and what was delivered is thrown away.

    Args:
        schedule: Whose epoch is read.
        workers: How many copies there are.

    Attributes:
        starts: Where each worker begins.
        first_worker: Whose turn it is.
        base_seed: Torch's seed of the workers, if they have one.
    """

    def __init__(self, schedule: Schedule, workers: int) -> None:
        self.starts = [StreamStart()] * max(workers, 1)
        self.first_worker = 0
        self.base_seed: int | None = None
        world = schedule.world()
        super().__init__(
            schedule, rank=world.rank, world_size=world.size, batch_size=schedule.batch_size, num_workers=workers
        )
        self._samples = self.start.samples
        self._reached_by = list(self.starts)
        self._next = self.first_worker

    def _take(self) -> None:
        self.starts = [
            StreamStart(whole_number("batches", batches), whole_number("read", read), _unpacked(own) if own else None)
            for batches, read, own in self.local["starts"]
        ]
        last = len(self.starts) - 1
        self.first_worker = whole_number("next_worker", self.local["next_worker"], high=last)
        if self.local["base_seed"] is not None:
            self.base_seed = whole_number("base_seed", self.local["base_seed"])

    def delivering(self, delivered: Delivered) -> None:
        """Count a batch of a worker's."""
        super().delivering(delivered)
        self._samples += delivered.samples
        before = self._reached_by[delivered.worker]
        self._reached_by[delivered.worker] = StreamStart(
            before.batches + 1, before.read + delivered.samples, delivered.resume
        )
        self._next = delivered.worker + 1

    def ended(self, finished: bool) -> None:
        """Advance the epoch, or, where its randomness is keyed by it, note that it was broken off."""
        super().ended(finished)
        if not finished and self._count and self._schedule.keys_stream():
            self._schedule.abandon(self.start, f"{self._count} batches")

    def _reached(self) -> State:
        starts = [(one.batches, one.read, "" if one.state is None else _packed(one.state)) for one in self._reached_by]
        return self._at(0, self._samples, starts=starts, next_worker=self._next % len(starts), base_seed=self.base_seed)


def _has_epoch(one: Any) -> bool:
    return callable(getattr(one, "set_epoch", None)) and isinstance(getattr(one, "epoch", None), int)


def _packed(value: Any) -> str:
    """Return a value as text, whatever `torch.load(weights_only=True)` can read back."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return base64.b85encode(zlib.compress(buffer.getvalue(), 1)).decode()


def _unpacked(text: str) -> Any:
    return torch.load(io.BytesIO(zlib.decompress(base64.b85decode(text))), weights_only=True)
