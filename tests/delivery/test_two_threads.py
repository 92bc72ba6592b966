"""One iterator, or the workers of one loader, in two threads: a clear error, and no batch is lost."""

import os
import signal
import threading
from typing import Any

import pytest

from headrace import DataLoader
from waiting import LIMIT_S, wait_until


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


def test_two_iterators_over_the_same_workers() -> None:
    loader = DataLoader(range(6), num_workers=1, seed=1, persistent_workers=True)
    assert len(list(loader)) == 6
    pool = loader._iterator
    thread = threading.Thread(target=pool._poll.poll)  # as in another thread's `next()`
    thread.start()

    def refused() -> bool:
        try:
            pool.poll()
        except RuntimeError as error:
            return "share them. Give each thread a loader of its own" in str(error)
        return False

    wait_until(refused)
    os.kill(pool.processes[0].pid, signal.SIGKILL)  # which ends the other thread's wait
    thread.join(LIMIT_S)
