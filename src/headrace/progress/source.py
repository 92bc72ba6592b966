"""What a loader reads: its dataset, what decides on the samples, and how the ranks share them."""

import weakref
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from headrace.plan import Order, Plan
from headrace.system import world
from headrace.system.user_warnings import warn_user
from headrace.types import Tail, World
from headrace.worker.sharing import StreamShare, follows_epoch


class Kind(Enum):
    """What decides on a loader's samples; the values are the names of the modes in a `State`."""

    PLAN = "plan"
    """A plan."""

    PARITY = "parity"
    """Torch's own samplers; a plan in a group of several ranks, or where the state of a plan was loaded."""

    SAMPLER = "sampler"
    """The user's sampler or batch sampler."""

    STREAM = "stream"
    """An iterable dataset."""

    DATAPIPE = "datapipe"
    """A datapipe. Torch's own iterators read it, also where a plan splits a map-style one over several ranks."""

    @property
    def reason(self) -> str:
        """Why a loader of this kind follows no plan."""
        return {
            Kind.PARITY: "torch's own samplers decide, as in torch's loader",
            Kind.SAMPLER: "the sampler or batch_sampler that was passed decides",
            Kind.STREAM: "an IterableDataset decides what comes",
            Kind.DATAPIPE: "datapipes are read by torch's own iterators",
        }.get(self, "")


@dataclass
class Source:
    """The loader's arguments that decide what is read, and what is found out only when iteration begins.

    Attributes:
        kind: What decides on the samples.
        dataset: The user's dataset.
        batch_size: Samples per rank and step.
        tail: The tail rule, resolved.
        tail_argument: The argument that chose the tail rule, as the user wrote it.
        distributed: The loader's argument.
        seed: The loader's argument.
        generator: Where a seed is drawn from if there is none.
        order: The resolved order; None where a sampler of the user's or an iterable dataset decides.
        sampler: The type of the user's sampler, by name; "" if there is none.
        in_runs: Whether global batches are dealt in runs, as `Plan` has it.
        default_seed: The seed where neither the loader nor a state has one; None for the usual default.
        state_seed: The seed of the state that was loaded last, if it has one.
    """

    kind: Kind
    dataset: Any
    batch_size: int
    tail: Tail
    tail_argument: str
    distributed: bool | World | DeviceMesh | None
    seed: int | None
    generator: torch.Generator | None
    order: Order | None
    sampler: str = ""
    in_runs: bool = False
    default_seed: int | None = None
    state_seed: int | None = None
    _drawn_seed: int | None = None
    _plan: Plan | None = None
    _warned: set[str] = field(default_factory=set)
    _batch_sampler: Any = None

    @property
    def batch_sampler(self) -> Any:
        """Its attribute `even_batches`, which Accelerate sets, chooses "pad" or "exact"; None: `tail` does.

        It refers to the loader's automatic sampler, which refers to this: the loader keeps it.
        """
        return None if self._batch_sampler is None else self._batch_sampler()

    @batch_sampler.setter
    def batch_sampler(self, batches: Any) -> None:
        self._batch_sampler = None if batches is None else weakref.ref(batches)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_batch_sampler": self.batch_sampler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.batch_sampler = state["_batch_sampler"]

    def world(self) -> World:
        """Return the world as it is now."""
        return world.resolve(self.distributed)

    def current_tail(self) -> Tail:
        """Return the tail rule as it is now."""
        batches = self.batch_sampler
        if self.tail == "drop" or batches is None:
            return self.tail
        return "pad" if batches.even_batches else "exact"

    def planned(self) -> bool:
        """Tell whether the next epoch follows a plan, rather than torch's own samplers."""
        if self.kind is Kind.PLAN:
            return True
        if self.order is None:
            return False
        return self.state_seed is not None or self.world().size > 1

    @property
    def mode(self) -> str:
        """What decides on the samples of the next epoch, as a `State` names it."""
        return Kind.PLAN.value if self.kind is Kind.PARITY and self.planned() else self.kind.value

    @property
    def described(self) -> str:
        """The order in words, or the type of the user's sampler. Describing a large order takes long the first time."""
        return self.sampler if self.order is None else self.order.described

    def length(self) -> int:
        """Count the dataset's samples; -1 where it cannot say."""
        try:
            return len(self.dataset)
        except Exception:  # noqa: BLE001 - a pass may begin all the same: torch does not ask
            return -1

    def resolved_seed(self) -> int:
        """Return the seed: the user's, the state's, the default, 0 in a world of several ranks, or one drawn once."""
        for seed in (self.seed, self.state_seed, self.default_seed):
            if seed is not None:
                return seed
        if self.world().size > 1:
            return 0
        if self._drawn_seed is None:
            self._drawn_seed = draw_base_seed(self.generator)
        return self._drawn_seed

    def shape(self) -> Plan:
        """Return the plan without its seed: enough for every length, and no number is drawn.

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
            # Where an order cuts its epochs, ranks may need another number of steps under another seed. None is drawn.
            seed=0 if self.order.per_rank is None or self.world().size == 1 else self.resolved_seed(),
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
            if plan.tail == "drop" and not plan.size(0, 0):
                size = (
                    f"{plan.world.size} ranks x {plan.batch_size} = {plan.global_batch}" if plan.even else "the order"
                )
                warn_user(
                    f"{self.tail_argument} leaves no batch at all: {plan.samples} samples are fewer than one global "
                    f"batch of {size}. Use a smaller "
                    'batch_size, or tail="pad" or "exact" instead.',
                )
        assert self._plan is not None
        return self._plan

    def splits_stream(self) -> bool:
        """Tell whether an iterable dataset's samples are dealt to the ranks: only if the user asked for it."""
        return self.distributed is True or world.is_given(self.distributed)

    def stream_share(self) -> StreamShare | None:
        """Return how an iterable dataset's samples are dealt to the ranks; None where they are not."""
        if not self.splits_stream():
            return None
        world = self.world()
        return StreamShare(world, self.tail, self.batch_size if self.in_runs and world.size > 1 else 1)

    def stream_samples(self, length: int) -> int:
        """Count this rank's samples of an iterable dataset of `length` samples that is split."""
        world = self.world()
        if self.tail == "exact":
            return len(range(world.rank, length, world.size))
        return length // world.size if self.tail == "drop" else -(-length // world.size)

    def keys_stream(self) -> bool:
        """Tell whether an iterable dataset's randomness is keyed by (seed, epoch)."""
        return self.seed is not None or self.splits_stream()

    def tells_stream(self) -> bool:
        """Tell whether an iterable dataset is told the epoch, on which its samples then depend."""
        return self.keys_stream() or follows_epoch(self.dataset)

    def stream_words(self) -> tuple[int, ...] | None:
        """Return what keys an iterable dataset's randomness, or None for torch's own worker seeds.

        Where the stream is split every rank must read the same samples. Where it is not, each rank draws its own
        random numbers.
        """
        if self.splits_stream():
            return (self.resolved_seed(),)
        return None if self.seed is None else (self.seed, self.world().rank)

    def keyed(self, mode: str) -> bool:
        """Tell whether a seed of the loader's keys the randomness in a mode."""
        return mode == "plan" or (mode == "stream" and self.keys_stream())

    def warn_once(self, text: str, topic: str) -> None:
        """Warn of a topic, once in the loader's life."""
        if topic not in self._warned:
            self._warned.add(topic)
            warn_user(text)


def draw_base_seed(generator: torch.Generator | None) -> int:
    """Draw one 63-bit number from a generator, the global one if None, as each of torch's iterators does."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
