"""Epochs of every kind of order, and what the ranks of a plan read of them."""

from collections.abc import Iterable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from headrace.plan import Balanced, Order, Plan, Sequential, Shuffled, Subset, Weighted
from headrace.types import World

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)
WORLDS = st.tuples(st.integers(1, 9), st.integers(1, 8))
"""World size and batch size."""


class Case(NamedTuple):
    """An order over a dataset, and the words that key its epoch."""

    order: Order
    length: int
    seed: int
    epoch: int

    def plans(self, size: int, batch_size: int, **options: Any) -> list[Plan]:
        return [
            Plan(self.order, self.length, batch_size, World(rank, size), seed=self.seed, **options)
            for rank in range(size)
        ]

    def at(self, positions: Iterable[int]) -> list[int]:
        """The dataset indices at positions of the epoch."""
        return self.order.epoch(self.seed, self.epoch, self.length)(np.array(list(positions), np.int64)).tolist()

    def whole(self) -> list[int]:
        """The epoch's dataset indices in order."""
        return self.at(range(self.order.samples(self.length)))


@st.composite
def cases(draw: st.DrawFn, kinds: str = "sequential shuffled subset shuffled-subset") -> Case:
    """Epochs of 1 to 200 samples of one of the kinds of order."""
    samples = draw(st.integers(1, 200))
    kind = draw(st.sampled_from(kinds.split()))
    seed, epoch = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**40))
    chance = np.random.default_rng(samples)
    if kind == "weighted":
        return Case(Weighted(chance.integers(0, 5, 30) + 0.5, num_samples=samples), 30, seed, epoch)
    if kind == "balanced":
        return Case(Balanced(chance.integers(0, 5, 30), length=samples), 30, seed, epoch)
    if "subset" in kind:
        chosen = chance.permutation(samples + 20)[:samples]
        return Case(Subset(chosen, shuffle="shuffled" in kind), samples + 20, seed, epoch)
    return Case(Shuffled() if kind == "shuffled" else Sequential(), samples, seed, epoch)


EVERY_KIND = cases("sequential shuffled subset shuffled-subset weighted balanced")


def read_by(plans: list[Plan], epoch: int, cursor: int = 0) -> list[list[list[int]]]:
    """The positions each rank reads at each step: [rank][step][place]."""
    return [
        [plan.positions(epoch, step, cursor).tolist() for step in range(plan.steps(epoch, cursor))] for plan in plans
    ]


def flat(batches: list[list[list[int]]]) -> list[int]:
    return [position for batch in chain(*batches) for position in batch]
