"""The loaders whose states `saved_states.json` holds, as an earlier release saved them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from headrace import Balanced, DataLoader, Shuffled, Subset, Weighted

LENGTH = 23


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


class Counting(IterableDataset[int]):
    """Keeps a state of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < LENGTH:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _sampled() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    sampler = BatchSampler(RandomSampler(range(LENGTH), generator=generator), 3, drop_last=False)
    return DataLoader(range(LENGTH), batch_sampler=sampler, generator=generator)


LOADERS: dict[str, tuple[Callable[[], DataLoader[Any]], int]] = {
    "plan": (lambda: DataLoader(range(LENGTH), 3, shuffle=True, seed=5), 4),
    "plan at its end": (lambda: DataLoader(range(LENGTH), 3, shuffle=True, seed=5), 8),
    "plan in any order": (
        lambda: DataLoader(range(LENGTH), 3, shuffle=True, seed=5, num_workers=2, in_order=False, executor="thread"),
        3,
    ),
    "weighted": (lambda: DataLoader(range(LENGTH), 3, order=Weighted([1.0] * 11 + [2.0] * 12, 17), seed=5), 2),
    "balanced": (lambda: DataLoader(range(LENGTH), 3, order=Balanced([0, 1, 1] * 7 + [2, 2]), seed=5), 2),
    "subset": (lambda: DataLoader(range(LENGTH), 3, order=Subset(range(2, 20)), shuffle=True, seed=5), 2),
    "drawn seed": (lambda: DataLoader(range(LENGTH), 3, order=Shuffled(), tail="drop"), 2),
    "parity": (lambda: DataLoader(range(LENGTH), 3, shuffle=True), 4),
    "parity before it begins": (lambda: DataLoader(range(LENGTH), 3, shuffle=True), 0),
    "sampler": (_sampled, 4),
    "stream": (lambda: DataLoader(Stream(), 3, num_workers=2), 3),
    "keyed stream": (lambda: DataLoader(Stream(), 3, seed=5), 3),
    "dealt stream": (lambda: DataLoader(Stream(), 3, distributed=True, seed=5), 3),
    "stateful stream": (lambda: DataLoader(Counting(), 3), 3),
}
"""By name: makes the loader, and how many batches were delivered before its state was saved."""


def rest_of(loader: DataLoader[Any]) -> list[list[int]]:
    """Read the rest of the epoch."""
    return [torch.as_tensor(batch).tolist() for batch in loader]
