"""How far workers run ahead, and how much shared memory they take, whatever the consumer does."""

import gc
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from headrace import DataLoader
from headrace.executors.dispatch import rules
from waiting import LIMIT_S

pytestmark = pytest.mark.filterwarnings("ignore:epoch 0 was abandoned")

LENGTH, WORKERS, PREFETCH = 40, 2, 3

AHEAD = WORKERS * PREFETCH


def slots(ahead: int, held: int) -> int:
    """Return how many slots the rank may have mapped: those of batches that are ahead, of those held, and one a worker.

    The next batch is asked for before the user drops the one before, which is therefore held, too.
    """
    return ahead + held + 1 + WORKERS


@pytest.fixture(autouse=True)
def _nobody_is_helped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy of a task that is overdue, on a busy machine, would be counted, too."""
    monkeypatch.setattr(rules, "OVERDUE_S", 1000.0)


class Ledger(torch.utils.data.Dataset[torch.Tensor]):
    """Large samples; each that is finished leaves a byte in a file. One worker may be made to wait for a byte."""

    def __init__(self, path: Path, slow_worker: int | None = None) -> None:
        self.path = path
        path.touch()
        self.slow_worker = slow_worker
        self.gate, self.opener = os.pipe()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        if info is not None and info.id == self.slow_worker:
            os.read(self.gate, 1)
        with self.path.open("ab") as file:
            file.write(b"x")
        return torch.full((20_000,), index, dtype=torch.uint8)

    def finished(self) -> int:
        """Count the samples finished so far, by all workers."""
        return self.path.stat().st_size

    def wait_for(self, count: int) -> None:
        """Wait until at least so many samples are finished."""
        deadline = time.monotonic() + LIMIT_S
        while self.finished() < count:
            assert time.monotonic() < deadline, f"{self.finished()} of {count} finished"
            os.sched_yield()

    def open_gate(self, times: int) -> None:
        os.write(self.opener, b"x" * times)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Callable[..., Ledger]]:
    made: list[Ledger] = []

    def make(**options: Any) -> Ledger:
        made.append(Ledger(tmp_path / f"ledger {len(made)}", **options))
        return made[-1]

    yield make
    for one in made:
        os.close(one.gate)
        os.close(one.opener)


def a_loader(dataset: Ledger, **options: Any) -> DataLoader[Any]:
    options = {"num_workers": WORKERS, "prefetch_factor": PREFETCH, "batch_size": None, "seed": 0} | options
    return DataLoader(dataset, multiprocessing_context="fork", **options)


def mapped(reader: Any) -> int:
    """Count the slots that the rank has mapped."""
    return sum(len(peer.wire.loans) for peer in reader._pool._peers)


MODES = [
    pytest.param({}, id="plan"),
    pytest.param({"in_order": False}, id="plan-any-order"),
    pytest.param({"seed": None}, id="parity"),
    pytest.param({"seed": None, "in_order": False}, id="parity-any-order"),
]


@pytest.mark.parametrize("options", MODES)
def test_a_slow_consumer_finds_exactly_what_was_promised(ledger: Any, options: dict[str, Any]) -> None:
    dataset = ledger()
    reader = iter(a_loader(dataset, **options))
    for delivered in range(LENGTH):
        dataset.wait_for(min(delivered + AHEAD, LENGTH))
        next(reader)
        assert dataset.finished() - delivered - 1 <= AHEAD
        assert mapped(reader) <= slots(AHEAD, 1)
    assert next(reader, None) is None
    assert dataset.finished() == LENGTH


@pytest.mark.parametrize("options", MODES)
def test_a_fast_consumer(ledger: Any, options: dict[str, Any]) -> None:
    dataset = ledger()
    reader = iter(a_loader(dataset, **options))
    for delivered in range(1, LENGTH + 1):
        next(reader)
        assert dataset.finished() - delivered <= AHEAD
        assert mapped(reader) <= slots(AHEAD, 1)


def test_a_slow_worker_holds_the_others_back_in_order(ledger: Any) -> None:
    """The first batch is its: the others do what was handed out at the beginning, and no more, until it comes."""
    dataset = ledger(slow_worker=0)
    reader = iter(a_loader(dataset))
    dataset.wait_for(PREFETCH)
    seen: list[int] = []

    def watch() -> None:
        for released in range(LENGTH):
            dataset.wait_for(min(PREFETCH + released, LENGTH - 1))
            seen.append(dataset.finished())
            dataset.open_gate(1)
            if len(delivered) == LENGTH:
                return

    delivered: list[int] = []
    watcher = threading.Thread(target=watch)
    watcher.start()
    for batch in reader:
        delivered.append(int(batch[0]))
        assert dataset.finished() - len(delivered) <= AHEAD
    dataset.open_gate(LENGTH)
    watcher.join()
    assert delivered == list(range(LENGTH))
    assert seen[0] == PREFETCH


def test_a_worker_that_stands_still_costs_no_more_than_its_own_batches(ledger: Any) -> None:
    """Out of order, and dealt to the least loaded: the other worker does all the rest."""
    dataset = ledger(slow_worker=0)
    reader = iter(a_loader(dataset, in_order=False))
    for delivered in range(LENGTH - PREFETCH):
        next(reader)
        assert dataset.finished() - delivered - 1 <= AHEAD - PREFETCH
    dataset.open_gate(PREFETCH)
    assert len(list(reader)) == PREFETCH


@pytest.mark.parametrize("options", [{}, {"seed": None}], ids=["plan", "parity"])
def test_restarts_of_persistent_workers_do_not_add_up(ledger: Any, options: dict[str, Any]) -> None:
    """What the workers still owe of an abandoned pass is done or dropped, and thrown away: nothing piles up."""
    dataset = ledger()
    loader = a_loader(dataset, persistent_workers=True, **options)
    passes, asked = 12, 0
    for number in range(passes):
        reader = iter(loader)
        for _ in range(1 + number % 3):
            next(reader)
        asked += AHEAD + 1 + number % 3
        assert dataset.finished() <= asked
        # The reader before holds what came for it, until the new one has asked for its first batches.
        assert mapped(reader) <= slots(3 * AHEAD, 1)
    in_turn = bool(options)  # then each task is sent at once; those of a plan may be dropped before
    dataset.wait_for(asked if in_turn else asked - passes * AHEAD)
    assert sum(1 for _ in loader) == LENGTH
    early = 0 if in_turn else AHEAD  # a plan's next epoch has begun
    assert dataset.finished() - asked - LENGTH <= early
    assert mapped(iter(loader)) <= slots(3 * AHEAD, 1)


def test_two_readers_of_the_same_workers(ledger: Any) -> None:
    dataset = ledger()
    loader = a_loader(dataset, persistent_workers=True)
    first, second = iter(loader), iter(loader)
    delivered = 0
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        delivered += 2
        assert one[0] == other[0] == number
        assert dataset.finished() - delivered <= 2 * AHEAD
        assert mapped(first) <= slots(2 * AHEAD, 4), "each reader asks while the pair before is held"
    assert delivered == 2 * LENGTH


def test_who_keeps_batches_pays_for_those_alone(ledger: Any) -> None:
    dataset = ledger()
    loader = a_loader(dataset, persistent_workers=True)
    keep = 9
    kept: deque[torch.Tensor] = deque(maxlen=keep)
    for _ in range(2):
        reader = iter(loader)
        for batch in reader:
            kept.append(batch)
            assert mapped(reader) <= slots(AHEAD, keep)
    kept.clear()
    for _ in range(3):
        for number, batch in enumerate(loader):
            assert batch.tolist()[::5000] == [number] * 4
        assert mapped(reader) <= slots(AHEAD, keep), "slots that came back are used again"


def test_batches_kept_for_ever_stay_as_they_are(ledger: Any) -> None:
    reader = iter(a_loader(ledger()))
    kept = []
    for batch in reader:
        kept.append(batch)
        assert reader._pool is None or len(kept) <= mapped(reader) + 1 <= len(kept) + slots(AHEAD, 1)
    del reader
    gc.collect()
    assert [set(batch.tolist()) for batch in kept] == [{number} for number in range(LENGTH)]
