"""What all passes have in common: counting, ending, and taking up a state."""

import base64
import io
import json
import zlib
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property
from pickle import UnpicklingError
from typing import Any

import torch

from headrace.delivery.reader import Delivered, Observer
from headrace.errors import StateMismatch, whole_number
from headrace.plan.state import State, mismatch
from headrace.schedule import Schedule


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
        self._begin()
        schedule.latest = self

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
        self.__dict__.pop("_base", None)
        self._count = 0  # batches delivered since
        # Tasks done without a gap, counted from the start, and those done beyond one.
        self._done = 0
        self._skipped = sorted(self._beyond)

    def _take(self) -> None:
        """Take what the state holds for this kind of pass."""

    @cached_property
    def _base(self) -> State:
        """The state at the start; not worked out before it is asked for, since describing an order may take long."""
        return self._schedule.state_at(self.start, self._facts)

    @property
    def resumed(self) -> bool:
        """Whether the pass goes on in the middle of an epoch."""
        return bool(self.start.samples or self.local)

    def _moves(self) -> bool:
        """Go over to the epoch that was set since `iter()`, as Lightning does; tell whether one was.

        A state that was loaded since is for the next pass: it may have another seed.
        """
        schedule = self._schedule
        if self.start is schedule.start or not schedule.start.chosen or self._facts != schedule.facts():
            return False
        self._begin()
        schedule.latest = self
        return True

    def delivering(self, delivered: Delivered) -> None:
        """Count a batch; one that comes again, after an interrupt, has been counted."""
        self._count = delivered.nth
        number = self._absolute(delivered)
        if number > self._done:
            self._beyond.add(number)
        elif number == self._done:
            self._done += 1
            while self._beyond and self._done in self._beyond:
                self._beyond.remove(self._done)
                self._done += 1

    def _absolute(self, delivered: Delivered) -> int:
        """Return the number of a task from the start, in which those count that were done beyond a gap before it."""
        number = delivered.number
        for skipped in self._skipped:
            number += skipped <= number
        return number

    def _counted(self, delivered: Delivered) -> bool:
        """Tell whether a batch comes again, after an interrupt."""
        number = self._absolute(delivered)
        return number < self._done or number in self._beyond

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
