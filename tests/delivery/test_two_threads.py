"""One iterator, or the workers of one loader, in two threads: a clear error, and no batch is lost."""

import os
import threading
from typing import Any

import pytest

from headrace import DataLoader
from waiting import LIMIT_S


class Gated:
    """The first sample that is read waits until the test opens a gate."""

    def __init__(self) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        self.reached.set()
        assert self.gate.wait(LIMIT_S)
        return index


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"num_workers": 2, "executor": "thread"}])
def test_one_iterator_in_two_threads(options: dict[str, Any]) -> None:
    dataset = Gated()
    reader = iter(DataLoader(dataset, **options))
    read: list[int] = []
    thread = threading.Thread(target=lambda: read.append(int(next(reader))))
    thread.start()
    assert dataset.reached.wait(LIMIT_S)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="two threads read from one iterator"):
            next(reader)
    dataset.gate.set()
    thread.join(LIMIT_S)
    assert read + [int(batch) for batch in reader] == list(range(6))


class Piped:
    """Each sample waits until there is a byte in a pipe."""

    def __init__(self, end: int) -> None:
        self.end = end

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index + len(os.read(self.end, 1))


def test_two_iterators_over_the_same_workers() -> None:
    end, gate = os.pipe()
    fork = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    loader: DataLoader[int] = DataLoader(Piped(end), seed=1, **fork)
    numbers: list[int] = []
    errors: list[str] = []

    def read(reader: Any) -> None:
        try:
            numbers.append(int(next(reader)))
        except RuntimeError as error:  # whichever thread came second; the first waits until the gate opens
            errors.append(str(error))
            os.write(gate, bytes(100))

    threads = [threading.Thread(target=read, args=(iter(loader),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert numbers == [int(loader.plan().batch(0, 0)[0]) + 1]
    assert len(errors) == 1
    assert "share them. Give each thread a loader of its own" in errors[0]
    os.close(end)
    os.close(gate)
