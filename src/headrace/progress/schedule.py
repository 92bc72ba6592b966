"""Where a loader stands: its epoch, and the state that another loader may go on from."""

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from headrace.errors import StateMismatch, whole_number
from headrace.plan.state import State, mismatch
from headrace.progress.source import Source

MAX_EPOCH = 2**62
"""The largest epoch that may be chosen: keys and states hold 63 bits."""


@dataclass(frozen=True, eq=False)
class Start:
    """Where the next pass begins: made anew for each epoch and each state. Passes compare it by identity.

    Attributes:
        epoch: From 0.
        samples: How many of the epoch's samples were delivered before.
        rank_local: As in `State`.
        chosen: Whether `set_epoch` chose it. A reader that has delivered no batch yet then moves to it.
    """

    epoch: int = 0
    samples: int = 0
    rank_local: str = ""
    chosen: bool = False


class Facts(NamedTuple):
    """The first fields of a `State`: true of a loader for a whole pass, and perhaps not for the next one."""

    mode: str
    seed: int
    length: int


class HasState(Protocol):
    """A pass, as the schedule knows it."""

    def state(self) -> State:
        """Return the place after the last batch that was delivered."""


class Schedule:
    """What changes from epoch to epoch.

    Args:
        source: What the loader reads.

    Attributes:
        start: Where the next `iter()` begins.
        streams: The number of the last pass over an iterable dataset.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.start = Start()
        self._latest: weakref.ref[HasState] | None = None
        self.streams = 0
        self._offset: int | None = 0
        self._abandoned = ""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_latest": self.latest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.latest = state["_latest"]

    @property
    def latest(self) -> HasState | None:
        """The pass that began last, if it began since the epoch was set or a state loaded.

        The loader keeps it, not the schedule: a pass refers to the schedule, and no cycle may hold the dataset.
        """
        return None if self._latest is None else self._latest()

    @latest.setter
    def latest(self, reading: HasState | None) -> None:
        self._latest = None if reading is None else weakref.ref(reading)

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` reads."""
        return self.start.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` reads; the one it reads anyway goes on where it is."""
        epoch = whole_number("epoch", epoch, high=MAX_EPOCH, fix="Epochs count from 0.")
        if epoch != self.epoch:
            self.start, self.latest = Start(epoch, chosen=True), None
        self._abandoned = ""

    def follow_epoch(self, epoch: int) -> None:
        """Set the epoch for a framework that sets it through the sampler.

        Some begin to count at 0 again after a state was loaded: the first call then tells how far they are behind.
        """
        if self._offset is None:
            self._offset = max(0, self.epoch - whole_number("epoch", epoch, high=MAX_EPOCH, fix="Epochs count from 0."))
        self.set_epoch(epoch + self._offset)

    def skip(self, batches: int) -> bool:
        """Let the next pass begin after the epoch's first batches; tell whether that can be, which takes a plan."""
        if not self.source.planned() or self.start.rank_local:
            return False
        if batches:
            self.start, self.latest = Start(self.epoch, self.source.shape().cursor_after(self.epoch, batches - 1)), None
        return True

    def facts(self) -> Facts:
        """Return what a state says of the loader as it is now; another world may change it."""
        source, mode = self.source, self.source.mode
        return Facts(mode, source.resolved_seed() if source.keyed(mode) else 0, source.length())

    def state_at(self, start: Start, facts: Facts) -> State:
        """Return the state of a loader that stands at a start."""
        return State(*facts, self.source.described, start.epoch, start.samples, start.rank_local)

    def state(self) -> State:
        """Return the place after the last batch that was delivered."""
        latest = self.latest
        if latest is not None:
            return latest.state()
        return self.state_at(self.start, self.facts())

    def load(self, state: State) -> None:
        """Let the next `iter()` begin where another loader was; passes that have begun are left alone.

        Raises:
            StateMismatch: The state belongs to another loader; the text has both values.
        """
        source = self.source
        self._check(state)
        start = Start(state.epoch, state.samples, state.rank_local)
        if state.mode == "plan":
            assert source.order is not None
            samples = source.order.samples(state.length)
            if state.samples > samples:
                raise StateMismatch(f'state["samples"] is {state.samples}, and the epoch has {samples}.')
            if state.samples == samples:
                start = Start(state.epoch + 1)
        self.start, self.latest, self._abandoned, self._offset = start, None, "", None
        source.state_seed = state.seed if source.keyed(state.mode) else None

    def _check(self, state: State) -> None:
        """Refuse a state of another loader. A state that was loaded before does not count."""
        source = self.source
        loaded, source.state_seed = source.state_seed, None
        try:
            mode = source.mode
        finally:
            source.state_seed = loaded
        if state.mode != mode and (state.mode != "plan" or source.order is None):
            fix = "Load it into a loader with the same kind of dataset and sampler."
            if mode == "plan":
                fix = "A state that goes on in any world comes from a loader under a plan: pass seed= where you save."
            raise mismatch("mode", state.mode, mode, fix)
        if state.mode == "datapipe":
            raise StateMismatch("a loader over datapipes keeps no place in them: use a Dataset or IterableDataset.")
        length = source.length()
        if state.length != length:
            raise mismatch("len(dataset)", state.length, length, "Every epoch's order is a function of the length.")
        if state.order != source.described:
            fix = "Use the order it was saved with; it decides what is left."
            raise mismatch("order", state.order, source.described, fix)
        if source.keyed(state.mode) and source.seed not in (None, state.seed):
            raise mismatch("seed", state.seed, source.seed, "Pass the state's seed, or leave it out to go on with it.")

    def begin(self) -> None:
        """Give the warnings that belong to the begin of an epoch, each once.

        One is about an earlier reader that left this epoch before its end. The other is about a loader's `generator`
        that several ranks do not use.
        """
        source = self.source
        if self._abandoned:
            source.warn_once(
                f"epoch {self.epoch} was abandoned after {self._abandoned} and starts again where it began, since "
                "an epoch advances only when it is finished. To go on with the next one call "
                f"loader.set_epoch({self.epoch + 1}) before iterating; to read the rest of this one, keep its iterator "
                "or load what loader.state_dict() returned.",
                "abandoned",
            )
        self._abandoned = ""
        size = source.world().size
        keyed = size > 1 and source.keyed(source.mode)
        if keyed and source.generator is not None and source.seed is source.state_seed is None:
            source.warn_once(
                f"generator is ignored: {size} ranks split the epoch, each of which could have another, "
                f"and take the seed {source.resolved_seed()}. Pass seed=, the same on all ranks, instead.",
                "generator",
            )

    def finish(self, start: Start) -> None:
        """Advance, unless the loader has been sent elsewhere since (set_epoch, a state, or a second reader)."""
        if self.start is start:
            self.start = Start(start.epoch + 1)
            self._abandoned = ""

    def abandon(self, start: Start, delivered: str) -> None:
        """Note that a reader was dropped before its epoch was finished, and how much it had delivered."""
        if self.start is start:
            self._abandoned = delivered
