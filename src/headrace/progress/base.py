"""A pass: one reader's way through an epoch. It yields the tasks, counts what is delivered, and returns the state."""

import base64
import io
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pickle import UnpicklingError
from typing import Any

import torch

from headrace.errors import StateMismatch, whole_number
from headrace.plan.state import State, mismatch
from headrace.progress.schedule import Schedule
from headrace.types import Task

MOST_BATCHES = 2**48
"""No epoch has more batches: a state that counts more was changed by hand, and they are not looked for."""


class Observer:
    """Is told of a reader's progress; the methods do nothing unless overridden."""

    def delivering(self, nth: int, number: int, worker: int, samples: int, resume: Any, last: bool) -> None:
        """A batch, or the error in its place, is about to be delivered. After an interrupt this is called again.

        Args:
            nth: How many batches of the pass are delivered then, this one included.
            number: The number of its task in the pass, from 0.
            worker: The worker that computed it.
            samples: The number of its samples.
            resume: The place after it in a worker's copy of an iterable dataset; None elsewhere, and after an error.
            last: Whether the reader knows that nothing follows; only a reader that stages ahead knows.
        """

    def exhausted(self, worker: int, of_dataset: Any) -> None:
        """A worker's copy of an iterable dataset is at its end, with this state of its own; None if it keeps none."""

    def ended(self, finished: bool) -> None:
        """The pass is over: it is finished, or the reader was dropped before its end."""


class Pass(Observer, ABC):
    """A pass: all that a reader needs to know of an epoch.

    It counts what is delivered, advances the schedule at its end, and returns the loader's state.

    Args:
        schedule: The loader's place in the epochs.
        conditions: Values that a pass must share with this one to resume from its rank-local state, by name.

    Attributes:
        observers: Other observers that the reader tells of its progress.
        repeatable: Whether `tasks` can be called again, after an interrupt.
        steps: The number of its tasks; -1 if unknown, None before it was counted.
        first_worker: The worker that gets the first task, where tasks are dealt round robin.
    """

    # Counters are plain attributes, and nothing reads `__dict__` (as cached_property does): CPython then writes them in
    # half the time.
    steps: int | None = None
    observers: Sequence[Observer] = ()
    repeatable: bool = False
    first_worker: int = 0
    _local_only = True
    _remedy = "Elsewhere than under a plan a state belongs to one rank, and to one way of cutting its batches."

    def __init__(self, schedule: Schedule, **conditions: Any) -> None:
        self._schedule = schedule
        self._conditions = conditions
        self._over = False
        self._begin()
        schedule.latest = self

    def __getstate__(self) -> dict[str, Any]:
        # A copy tells the same place. What is left to read, and who is told, belong to the reader of this one.
        return {name: value for name, value in vars(self).items() if name not in ("_tasks", "observers")}

    def _begin(self) -> None:
        """Take the start that the schedule has now.

        Raises:
            StateMismatch: Only another rank, or a loader with other options, can go on from there.
        """
        self.start = start = self._schedule.start
        self.local: dict[str, Any] = {}
        self._beyond: set[int] = set()
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
        self._facts = self._schedule.facts()  # now: the process group may be gone when a state is asked for
        self._base: State | None = None
        self._count = 0  # batches delivered since
        # Tasks delivered without a gap, counted from the start, and those delivered beyond the first gap.
        self._done = 0
        self._skipped = sorted(self._beyond)
        self._samples = start.samples

    @abstractmethod
    def tasks(self, first: int = 0) -> Iterator[Task]:
        """Return the tasks that are left of the epoch, in order.

        Args:
            first: The number of the first task to return; other than 0 only if the pass is `repeatable`.
        """

    def revised(self) -> Iterator[Task] | None:
        """Return other tasks if `set_epoch`, called between `iter()` and the first batch, changes them; else None."""
        return None

    def early_tasks(self) -> Iterator[Task]:
        """Return the first tasks of the next pass that may be computed before it begins; none unless overridden."""
        return iter(())

    @abstractmethod
    def size(self, task: Task) -> int:
        """Count the samples of a task's batch; 0 if unknown. A batch of an iterable dataset carries its own count."""

    @abstractmethod
    def length(self) -> int:
        """Count the batches of the whole epoch.

        Raises:
            TypeError: The sampler or dataset has no length.
        """

    def _take(self) -> None:
        """Read the part of the rank-local state that belongs to this kind of pass."""

    def _at_start(self) -> State:
        """Return the state at the start, made when first needed: describing a large order takes long."""
        if self._base is None:
            self._base = self._schedule.state_at(self.start, self._facts)
        return self._base

    @property
    def resumed(self) -> bool:
        """Whether the pass goes on in the middle of an epoch."""
        return bool(self.start.samples or self.local)

    def _moves(self) -> bool:
        """Move to the epoch that was set after `iter()`, as Lightning sets it; return whether one was.

        A state that was loaded after `iter()` is for the next pass: it may have another seed.
        """
        schedule = self._schedule
        if self.start is schedule.start or not schedule.start.chosen or self._facts != schedule.facts():
            return False
        self._begin()
        schedule.latest = self
        return True

    def delivering(self, nth: int, number: int, worker: int, samples: int, resume: Any, last: bool) -> None:
        """Count a batch that is about to be handed over, and its samples.

        The last batch advances the epoch already now: a user who leaves the loop at that batch has finished the epoch.
        """
        self._count = nth
        if number == self._done and not (self._beyond or self._skipped):
            self._samples += samples
            self._done = number + 1
        else:
            self._deliver_beside_a_gap(number, samples)
        if self.steps is None:
            self.steps = self._count_steps()
        if self._done == self.steps:
            self._schedule.finish(self.start)

    def _count_steps(self) -> int:
        """Count the tasks of the pass, at its first batch; -1 if unknown."""
        return -1

    def _deliver_beside_a_gap(self, number: int, samples: int) -> None:
        for skipped in self._skipped:  # tasks delivered out of order before the start have numbers, too
            number += skipped <= number
        if number >= self._done and number not in self._beyond:  # else it is delivered again, after an interrupt
            self._samples += samples
            self._beyond.add(number)
        while self._done in self._beyond:
            self._done += 1
            self._beyond.remove(self._done - 1)

    def ended(self, finished: bool) -> None:
        """Advance the epoch."""
        if finished:
            self._over = True
            self._schedule.finish(self.start)

    def state(self) -> State:
        """Return the place after the last batch that was delivered."""
        if self._over:
            return self._at(1, 0)
        return self._reached() if self._count else self._at_start()

    @abstractmethod
    def _reached(self) -> State:
        """Return the place in the middle of the epoch."""

    def _at(self, epochs: int, samples: int, **local: Any) -> State:
        rank_local = json.dumps(self._conditions | local) if local else ""
        return replace(self._at_start(), epoch=self.start.epoch + epochs, samples=samples, rank_local=rank_local)


def count_samples(task: Task, batched: bool) -> int:
    """Count the samples of a task without a plan; 0 where a sampler yields something that cannot be counted."""
    if not batched:
        return 1
    if type(task) is range:
        return len(task)
    if type(task) is torch.Tensor:
        return task.shape[0]
    try:
        return len(task[-1])  # type: ignore[arg-type]
    except TypeError:
        return 0


def packed(value: Any, owner: Any = None) -> str:
    """Return a value as text that `unpacked` reads back.

    Args:
        value: Tensors, numbers, text and containers of such.
        owner: The user's object that it is the state of, if so: then it is read back at once, to see whether it can be.

    Raises:
        TypeError: The user's object has a state that holds other things.
    """
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        text = base64.b85encode(zlib.compress(buffer.getvalue(), 1)).decode()
        if owner is not None:
            unpacked(text)
    except Exception as error:
        raise TypeError(
            f"{type(owner).__qualname__}.state_dict() returned what torch.load(weights_only=True) does not read back. "
            "Keep to tensors, numbers, strings, lists, tuples and dictionaries."
        ) from error
    return text


def unpacked(text: str) -> Any:
    """Return the value."""
    return torch.load(io.BytesIO(zlib.decompress(base64.b85decode(text))), weights_only=True)
