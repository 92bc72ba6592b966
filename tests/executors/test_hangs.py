"""Workers that hang: others do their tasks, and a sample that hangs two of them is an error that names it."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comparable import flat
from executors.mortal_datasets import Gated, Mortal
from headrace import DataLoader, DeliveryTimeout
from headrace.executors.dispatch import pool as dispatch_pool
from headrace.executors.dispatch import rules
from rays import RAY, undisturbed
from waiting import wait_until

WORKERS = [
    pytest.param({"multiprocessing_context": "fork"}, id="fork"),
    pytest.param({"multiprocessing_context": "forkserver"}, id="forkserver"),
    pytest.param({"multiprocessing_context": "spawn"}, id="spawn", marks=pytest.mark.slow),
    pytest.param({"executor": replace(RAY, idle_s=0)}, id="ray", marks=pytest.mark.ray),
]


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds and minutes elsewhere takes tenths of a second and seconds here."""
    monkeypatch.setattr(rules, "PATIENCE_S", 0.3)
    monkeypatch.setattr(rules, "_HUNG_S", 1.5)
    monkeypatch.setattr(dispatch_pool, "CHECK_WORKERS_S", 0.1)


def a_loader(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": 3, "num_workers": 2, "seed": 3} | options)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_worker_that_hangs_is_helped_out_and_replaced(workers: dict[str, Any], tmp_path: Path) -> None:
    dataset = Mortal(tmp_path, [10], "hang", length=60)
    loader = a_loader(dataset, persistent_workers=True, **workers)
    assert [flat(batch) for batch in loader] == undisturbed(Mortal(tmp_path, length=60))
    assert loader.stats().restarts == 0
    epochs = 1
    while not loader.stats().restarts:  # it must have been silent for two seconds
        assert len(list(loader)) == 20
        epochs += 1
        assert epochs < 100_000
    assert dataset.counts()[10] in (epochs + 1, epochs + 2), "the next epoch may have begun"


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.usefixtures("_short")
def test_a_sample_that_hangs_two_workers_is_named(workers: dict[str, Any], tmp_path: Path) -> None:
    """Both are replaced, and the next batch follows."""
    dataset = Mortal(tmp_path, [10], "hang", times=99)
    loader = a_loader(dataset, **workers)
    reader = iter(loader)
    seen = [index for _ in range(3) for index in next(reader)["index"].tolist()]
    with pytest.raises(DeliveryTimeout, match=r"step 3 of epoch 0 \(samples \[9, 10, 11\]\) hangs") as caught:
        next(reader)
    who, *stacks = caught.value.__notes__
    assert "no answer for" in who
    assert who.count("(pid ") == 2
    assert len(stacks) == 2
    assert all("in end_process" in stack for stack in stacks), stacks
    seen += [index for batch in reader for index in batch["index"].tolist()]
    assert seen == [*range(9), *range(12, 30)]
    assert loader.stats().restarts >= 2
    assert dataset.counts()[10] in (2, 3), (
        "short tasks are answered together: one worker seemed to be at the task before"
    )


@pytest.mark.usefixtures("_short")
def test_the_only_worker_is_helped_out_by_another(tmp_path: Path) -> None:
    dataset = Mortal(tmp_path, [10, 16, 20], "hang")
    loader = a_loader(dataset, num_workers=1)
    assert [flat(batch) for batch in loader] == undisturbed(Mortal(tmp_path))
    assert loader.stats().restarts == 3


@pytest.mark.usefixtures("_short")
def test_a_slow_but_honest_sample_is_neither_killed_nor_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers are at it for longer than a worker that hangs may be silent."""
    monkeypatch.setattr(rules, "_HUNG_S", 60.0)
    dataset = Gated(tmp_path, [10])
    loader = a_loader(dataset)
    reader: Any = iter(loader)
    pool = reader._pool
    batches = [flat(next(reader)) for _ in range(3)]

    def let_on() -> None:
        wait_until(lambda: dataset.counts()[10] == 2)
        silent_s = max(peer.last_answer_s for peer in pool._peers) + 4 * rules.PATIENCE_S
        wait_until(lambda: time.monotonic() > silent_s)
        os.write(dataset.opener, b"xx")

    opener = threading.Thread(target=let_on)
    opener.start()
    batches += [flat(batch) for batch in reader]
    assert batches == undisturbed(Mortal(tmp_path))
    opener.join()
    assert loader.stats().restarts == 0
    dataset.close()
