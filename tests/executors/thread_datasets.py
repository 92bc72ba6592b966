"""Datasets that call what a test gives them; only threads can read those."""

import threading
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from headrace import DataLoader
from waiting import LIMIT_S


class Computed(Dataset[tuple[int, Any]]):
    """Calls a function for each sample."""

    def __init__(self, length: int, compute: Any) -> None:
        self.length, self.compute = length, compute

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.compute(index)


class Stream(IterableDataset[float]):
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __iter__(self) -> Any:
        return (self.draw() for _ in range(8))


class Gated(Dataset[Any]):
    """Each sample is an index and what `draw` returns; one of them waits for a gate, in the middle of its draws.

    Args:
        draw: What is drawn.
        late: Which sample waits.
        then: Called by that before it waits.
    """

    def __init__(self, draw: Any, late: int, then: Any = lambda: None) -> None:
        self.draw, self.late, self.then = draw, late, then
        self.reached, self.gate = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        first = self.draw()
        if index == self.late:
            self.reached.set()
            self.then()
            assert self.gate.wait(LIMIT_S)
        return index, first, self.draw()

    def batches(self, **options: Any) -> Any:
        return iter(self.loader(timeout=0.2, **options))

    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            self, num_workers=2, executor="thread", batch_size=3, seed=3, shuffle=False, collate_fn=list, **options
        )

    def expected(self) -> list[Any]:
        """What is read inline."""
        self.gate.set()
        expected = list(DataLoader(self, batch_size=3, seed=3, collate_fn=list))
        self.gate.clear()
        self.reached.clear()
        return expected
