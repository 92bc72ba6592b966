"""Passes over the indices that a sampler draws."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch

from headrace.errors import whole_number
from headrace.plan.state import State, mismatch
from headrace.progress.base import MOST_BATCHES, Pass, count_samples, packed, unpacked
from headrace.progress.schedule import Schedule
from headrace.randomness import Generators, callers_generators_kept
from headrace.types import Task
from headrace.worker.streams import has_state


class SamplerPass(Pass):
    """A pass over the indices that a sampler draws: torch's sampler, or the user's.

    Its state is rank-local. A sampler that has `state_dict` and `load_state_dict` saves and loads its own state. Any
    other is begun again with the random generators as they were. The batches that were delivered before are drawn again
    but not loaded.

    Args:
        schedule: The loader's place in the epochs.
        samplers: The user's samplers, outermost first; one of them may have a state.
        generators: The user's generators that samplers draw from.
        length: Counts the batches of an epoch; it may raise TypeError.
        batched: Whether a task is a list of samples.
        torch_alone: Whether samplers draw from torch's generators only.

    Attributes:
        behind: The number of the epoch's batches that were delivered before the start.
    """

    def __init__(
        self,
        schedule: Schedule,
        samplers: Sequence[Any],
        generators: Sequence[torch.Generator],
        length: Callable[[], int],
        batched: bool,
        torch_alone: bool,
    ) -> None:
        self._length, self._batched = length, batched
        self._tasks: Iterator[Task] = iter(())
        self._packed = ""
        self._torch_alone = torch_alone
        self.behind = 0
        self._sampler_state: Any = None
        world = schedule.source.world()
        sizes = [one.batch_size for one in samplers if isinstance(getattr(one, "batch_size", None), int)]
        batch_size = sizes[0] if sizes else schedule.source.batch_size
        super().__init__(schedule, rank=world.rank, world_size=world.size, batch_size=batch_size)
        self._stateful = next((one for one in samplers if has_state(one)), None)
        self._epochs = next((one for one in samplers if _has_epoch(one)), None)
        self._epoch = getattr(self._epochs, "epoch", None)
        self._generators = generators
        self._drawn: dict[int, Any] = {}  # the sampler's state after each batch that is not delivered yet
        self._began: tuple[Generators, list[torch.Tensor]]

    def _take(self) -> None:
        self.behind = whole_number("batches", self.local["batches"], high=MOST_BATCHES)
        self._packed = self.local["generators"]
        shared, own = unpacked(self._packed)
        self._began = Generators(shared), own
        self._sampler_state = unpacked(self.local["sampler"]) if "sampler" in self.local else None

    @contextmanager
    def as_it_began(self) -> Iterator[None]:
        """Put the generators that samplers draw from into the states that they had when the epoch began."""
        if not self._packed:
            self._began = Generators(torch_alone=self._torch_alone), [one.get_state() for one in self._generators]
            yield
            return
        if self._sampler_state is not None and self._stateful is None:
            raise mismatch("sampler", "a state of its own", "none", "Use the sampler that the state was saved with.")
        shared, own = self._began
        if len(own) != len(self._generators):
            raise mismatch("generators", len(own), len(self._generators), "Give the loader and its sampler the same.")
        with callers_generators_kept():
            shared.restore()
            for generator, state in zip(self._generators, own, strict=True):
                generator.set_state(state)
            if self._epochs is not None and "sampler_epoch" in self.local:
                self._epoch = self.local["sampler_epoch"]
                self._epochs.set_epoch(self._epoch)
            yield

    def open(self, draw: Callable[[], Iterator[Task]]) -> None:
        """Begin to draw, after the sampler has loaded its state.

        Args:
            draw: Begins to iterate over the sampler and returns its tasks. It is not kept: it refers to the loader.
        """
        if self._stateful is not None and self._sampler_state is not None:
            self._stateful.load_state_dict(self._sampler_state)
        self._tasks = draw()

    def skip(self) -> None:
        """Draw the tasks that were delivered before, and drop them."""
        tasks, done = self._tasks, frozenset(self._beyond)
        behind = 0 if self._sampler_state is not None else self.behind
        drawn = sum(1 for _ in islice(tasks, behind))
        if drawn < behind:
            fix = "Give the loader the sampler that the state was saved with."
            raise mismatch("batches delivered of the epoch", behind, drawn, fix)
        if self._stateful is not None:
            tasks = self._noted(tasks)
        if done:
            tasks = (task for number, task in enumerate(tasks) if number not in done)
        if self.resumed:  # a sampler that uses a generator at its first batch must do so here, in its old state
            tasks = chain(list(islice(tasks, 1)), tasks)
        self._tasks = tasks

    def tasks(self, first: int = 0) -> Iterator[Task]:
        """Return the tasks that are left of the epoch."""
        return self._tasks

    def size(self, task: Task) -> int:
        """Count the samples of a task's batch."""
        return len(task) if type(task) is range else count_samples(task, self._batched)

    def _noted(self, tasks: Iterator[Task]) -> Iterator[Task]:
        assert self._stateful is not None
        for number, task in enumerate(tasks):
            self._drawn[number] = copy.deepcopy(self._stateful.state_dict())
            for old in [one for one in self._drawn if one < self._done - 1]:
                del self._drawn[old]
            yield task

    def revised(self) -> None:
        """Take the number of the epoch that was set between `iter()` and the first batch; the tasks stay the same.

        A pass that resumed in the middle of an epoch keeps its number: it has drawn the rest of that epoch.
        """
        if not self.resumed:
            self._moves()

    def length(self) -> int:
        """Count the batches of an epoch, as the sampler says."""
        return self._length()

    def _count_steps(self) -> int:
        """Count the batches that are left; called when the sampler has begun and may know its length."""
        try:
            return self.length() - self.behind
        except Exception:  # noqa: BLE001 - torch does not ask; the end shows when it comes
            return -1

    def _reached(self) -> State:
        if self._done == self.steps:
            return self._at(1, 0)
        if not self._packed:
            shared, own = self._began
            self._packed = packed((shared.packed(), own))
        local = {"batches": self.behind + self._done, "generators": self._packed}
        if self._beyond:
            local["beyond"] = sorted(number - self._done for number in self._beyond)
        if self._done and self._stateful is not None:
            local["sampler"] = packed(self._drawn[self._done - 1], self._stateful)
        elif "sampler" in self.local:
            local["sampler"] = self.local["sampler"]
        if self._epoch is not None:
            local["sampler_epoch"] = self._epoch
        return self._at(0, self._samples, **local)


def _has_epoch(one: Any) -> bool:
    return callable(getattr(one, "set_epoch", None)) and isinstance(getattr(one, "epoch", None), int)
