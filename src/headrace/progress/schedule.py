"""Where a loader stands: its epoch, its seed, its plan, and the state that another loader may go on from."""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import IterDataPipe, MapDataPipe

from headrace.errors import StateMismatch, whole_number
from headrace.plan import Order, Plan
from headrace.plan.state import State, mismatch
from headrace.system import world
from headrace.types import Tail, World
from headrace.worker.sharing import StreamShare


@dataclass(frozen=True, eq=False)
class Start:
    """Where the next pass begins: made anew for each epoch and each state, and told apart by identity.

    Attributes:
        epoch: From 0.
        samples: How many of the epoch's samples were delivered before.
        rank_local: As in `State`.
        chosen: Whether `set_epoch` says so, which a reader without a batch yet follows.
    """

    epoch: int = 0
    samples: int = 0
    rank_local: str = ""
    chosen: bool = False


class Facts(NamedTuple):
    """The first fields of a `State`: what is true of a loader for a whole pass, but perhaps not for the next."""

    mode: str
    seed: int
    length: int


class HasState(Protocol):
    """A pass that knows how far it has come."""

    def state(self) -> State:
        """Return the place after the last batch that was delivered."""


@dataclass
class Schedule:
    """The mutable part of a loader: what changes from epoch to epoch, and what is found out only at iteration.

    Attributes:
        dataset: The user's dataset.
        batch_size: Samples per rank and step.
        tail: The tail rule, resolved.
        tail_as_given: The argument that chose it, in words.
        distributed: The loader's argument.
        seed: The loader's argument.
        generator: Where a seed is drawn from if there is none.
        order: The resolved order; None for iterable datasets.
        parity: Whether a world of one rank gives torch's own batches, unless a state says otherwise.
        sampler: The type of the user's sampler, by name; "" if there is none.
        in_runs: Whether global batches are dealt in runs, as `Plan` has it.
        batch_sampler: Its `even_batches`, which Accelerate sets, decides between "pad" and "exact"; None for the tail.
        default_seed: The seed where neither the loader nor a state has one; None for the usual.
        start: Where the next `iter()` begins.
        latest: The pass that began last, if it began since the epoch was set or a state loaded.
        streams: The number of the last pass over an iterable dataset.
    """

    dataset: Any
    batch_size: int
    tail: Tail
    distributed: bool | World | None
    seed: int | None
    generator: torch.Generator | None
    order: Order | None
    parity: bool
    sampler: str = ""
    in_runs: bool = False
    batch_sampler: Any = None
    default_seed: int | None = None
    tail_as_given: str = 'tail="drop"'
    start: Start = Start()
    latest: HasState | None = None
    streams: int = 0
    _drawn_seed: int | None = None
    _state_seed: int | None = None
    _offset: int | None = 0
    _plan: Plan | None = None
    _abandoned: str | None = None
    _warned: set[str] = field(default_factory=set)

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` reads."""
        return self.start.epoch

    def world(self) -> World:
        """Return the world as it is now."""
        return world.resolve(self.distributed)

    def current_tail(self) -> Tail:
        """Return the tail rule as it is now."""
        if self.tail == "drop" or self.batch_sampler is None:
            return self.tail
        return "pad" if self.batch_sampler.even_batches else "exact"

    def planned(self) -> bool:
        """Tell whether the next epoch follows a plan, rather than torch's own samplers."""
        if self.order is None:
            return False
        return not self.parity or self._state_seed is not None or self.world().size > 1

    @property
    def mode(self) -> str:
        """What decides on the samples, as `State` names it."""
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            return "datapipe"
        if self.order is None:
            return "sampler" if self.sampler else "stream"
        return "plan" if self.planned() else "parity"

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` reads; the one it reads anyway goes on where it is."""
        epoch = whole_number("epoch", epoch, fix="Epochs count from 0.")
        if epoch != self.epoch:
            self.start, self.latest = Start(epoch, chosen=True), None
        self._abandoned = None

    def skip(self, batches: int) -> bool:
        """Let the next pass begin behind an epoch's first batches; tell whether that can be, which takes a plan."""
        if not self.planned() or self.start.rank_local:
            return False
        if batches:
            self.start, self.latest = Start(self.epoch, self.shape().cursor_after(batches - 1)), None
        return True

    def follow_epoch(self, epoch: int) -> None:
        """Set the epoch for a framework that sets it through the sampler.

        Some begin to count at 0 again after a state was loaded: the first call then tells how far they are behind.
        """
        if self._offset is None:
            self._offset = max(0, self.epoch - whole_number("epoch", epoch, fix="Epochs count from 0."))
        self.set_epoch(epoch + self._offset)

    def resolved_seed(self) -> int:
        """Return the seed: the user's; the state's; a default; 0 in a world of several; else one drawn, once."""
        if self.seed is not None:
            return self.seed
        if self._state_seed is not None:
            return self._state_seed
        if self.default_seed is not None:
            return self.default_seed
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
            tail=self.current_tail(),
            in_runs=self.in_runs,
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
                    f"{self.tail_as_given} leaves no batch at all: {plan.samples} samples are fewer than one global "
                    f"batch of {plan.world.size} ranks x {plan.batch_size} = {plan.global_batch}. Use a smaller "
                    'batch_size, or tail="pad" or "exact" instead.',
                    stacklevel=5,
                )
        assert self._plan is not None
        return self._plan

    def splits_stream(self) -> bool:
        """Tell whether an iterable dataset's samples are dealt to the ranks; only on demand."""
        return self.distributed is True or isinstance(self.distributed, World)

    def dealing(self) -> StreamShare | None:
        """Return how an iterable dataset's samples are dealt to the ranks; None where they are not."""
        if not self.splits_stream():
            return None
        world = self.world()
        return StreamShare(world, self.tail, self.batch_size if self.in_runs and world.size > 1 else 1)

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

    def facts(self) -> Facts:
        """Return what a state says of the loader as it is now; another world may change it."""
        mode = self.mode
        keyed = mode == "plan" or (mode == "stream" and self.keys_stream())
        return Facts(mode, self.resolved_seed() if keyed else 0, _length(self.dataset))

    def state_at(self, start: Start, facts: Facts) -> State:
        """Return the state of a loader that stands at a start; describing its order may take long, the first time."""
        order = self.sampler if self.order is None else self.order.described
        return State(*facts, order, start.epoch, start.samples, start.rank_local)

    def state(self) -> State:
        """Return the place after the last batch that was delivered."""
        if self.latest is not None:
            return self.latest.state()
        return self.state_at(self.start, self.facts())

    def load(self, state: State) -> None:
        """Let the next `iter()` begin where another loader was; passes that have begun are left alone.

        Raises:
            StateMismatch: The state belongs to another loader; the text has both values.
        """
        # What a state is worth depends on the loader's own arguments, not on a state loaded before.
        fresh = replace(self, _state_seed=None)
        if state.mode != fresh.mode and (state.mode != "plan" or self.order is None):
            fix = "Load it into a loader with the same kind of dataset and sampler."
            if fresh.mode == "plan":
                fix = "A state that goes on in any world comes from a loader under a plan: pass seed= where you save."
            raise mismatch("mode", state.mode, fresh.mode, fix)
        if state.mode == "datapipe":
            raise StateMismatch("a loader over datapipes keeps no place in them: use a Dataset or IterableDataset.")
        length = _length(self.dataset)
        if state.length != length:
            raise mismatch("len(dataset)", state.length, length, "Every epoch's order is a function of the length.")
        order = self.sampler if self.order is None else self.order.described
        if state.order != order:
            raise mismatch("order", state.order, order, "Use the order it was saved with; it decides what is left.")
        keyed = state.mode == "plan" or (state.mode == "stream" and self.keys_stream())
        if keyed and self.seed not in (None, state.seed):
            raise mismatch("seed", state.seed, self.seed, "Pass the state's seed, or leave it out to go on with it.")
        start = Start(state.epoch, state.samples, state.rank_local)
        if state.mode == "plan":
            assert self.order is not None
            samples = self.order.samples(length)
            if state.samples > samples:
                raise StateMismatch(f'state["samples"] is {state.samples}, and the epoch has {samples}.')
            if state.samples == samples:
                start = Start(state.epoch + 1)
        self.start, self.latest, self._abandoned, self._offset = start, None, None, None
        self._state_seed = state.seed if keyed else None

    def begin(self) -> None:
        """Warn, once, if the epoch about to begin was broken off, and if the generator does not decide on it."""
        if self._abandoned:
            self.warn_once(
                f"epoch {self.epoch} was abandoned after {self._abandoned} and starts again where it began, since "
                "an epoch advances only when it is finished. To go on with the next one call "
                f"loader.set_epoch({self.epoch + 1}) before iterating; to read the rest of this one, keep its iterator "
                "or load what loader.state_dict() returned.",
                "abandoned",
                stacklevel=6,
            )
        self._abandoned = None
        if self.generator is not None and self.seed is self._state_seed is None and self.world().size > 1:
            self.warn_once(
                f"generator is ignored: {self.world().size} ranks split the epoch, each of which could have another, "
                f"and take the seed {self.resolved_seed()}. Pass seed=, the same on all ranks, instead.",
                "generator",
                stacklevel=6,
            )

    def warn_once(self, text: str, topic: str, stacklevel: int) -> None:
        """Warn of a topic, once in the loader's life."""
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(text, stacklevel=stacklevel)

    def finish(self, start: Start) -> None:
        """Advance, unless the loader has been sent elsewhere since (set_epoch, a state, or a second reader)."""
        if self.start is start:
            self.start = Start(start.epoch + 1)
            self._abandoned = None

    def abandon(self, start: Start, delivered: str) -> None:
        """Note that a reader was dropped before its epoch was finished, and how much it had delivered."""
        if self.start is start:
            self._abandoned = delivered


def _length(dataset: Any) -> int:
    """Count a dataset's samples; -1 where it cannot say."""
    try:
        return len(dataset)
    except Exception:  # noqa: BLE001 - a pass may begin all the same: torch does not ask
        return -1


def draw_base_seed(generator: torch.Generator | None) -> int:
    """Draw one 63-bit number from a generator, the global one if None, as each of torch's iterators does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
