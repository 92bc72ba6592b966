"""Which parts of a dataset are told the epoch, and that nobody reads one in two epochs at a time."""

import os
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from headrace import DataLoader, Deferred
from headrace.datasets import told_epoch
from headrace.datasets.told_epoch import ToldEpoch, tell_epoch, told_parts
from told_datasets import Told, Wrapped
from waiting import LIMIT_S, wait_until

ONE, OTHER = Told(3, draws=False), Told(3, draws=False)


class Passing:
    """A wrapper that passes on what it does not have."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ONE, name)


class Holding(TensorDataset):
    def __init__(self, held: Any) -> None:
        super().__init__(torch.zeros(3))
        self.held = held


@pytest.mark.parametrize(
    ("dataset", "parts"),
    [
        (ONE, [ONE]),
        (Subset(ConcatDataset([ONE, OTHER, ONE]), [0]), [ONE, OTHER]),
        (StackDataset(first=ONE, second=Wrapped(OTHER)), [ONE, OTHER]),
        (ConcatDataset([*[TensorDataset(torch.zeros(1))] * 99, ONE]), [ONE]),
        (Wrapped(Wrapped(Holding([ONE]))), [ONE]),
        (Passing(), [ONE]),
        (TensorDataset(torch.zeros(3)), []),
        (Holding([("path", 0)] * 3), []),
        (Holding(DataLoader(ONE, batch_size=3, seed=1)), []),
        ([1, 2], []),
    ],
    ids=lambda one: type(one).__name__,
)
def test_the_parts_that_are_told(dataset: Any, parts: list[Any]) -> None:
    assert told_parts(dataset) == parts


def test_what_is_built_late_is_told_then() -> None:
    built: Any = Deferred(partial(Told, 3, False), length=3)
    dataset = ConcatDataset([Told(3), built])
    tell_epoch(dataset, 4)
    assert built.built_here is None
    assert built[0][1] == 4
    tell_epoch(dataset, 5)
    assert built.built().calls == [4, 5]
    plain: Any = Deferred(partial(TensorDataset, torch.zeros(3)))
    assert told_parts(plain) == [plain]
    assert plain[0]
    assert told_parts(plain) == []


def test_nobody_reads_in_two_epochs_at_a_time() -> None:
    """Through whatever wrapper; and what tells an epoch for later leaves those alone that read."""
    dataset = Told(3, draws=False)
    first, second = ToldEpoch.of(Subset(dataset, [0])), ToldEpoch.of(Wrapped(dataset))
    assert first is not None
    assert second is not None
    begun, may_end = threading.Event(), threading.Event()
    found: list[int] = []

    def slowly() -> None:
        begun.set()
        may_end.wait(LIMIT_S)
        found.append(dataset.epoch)

    threads = [
        threading.Thread(target=first.read, args=(0, slowly)),
        threading.Thread(target=second.read, args=(1, lambda: found.append(dataset.epoch))),
    ]
    threads[0].start()
    assert begun.wait(LIMIT_S)
    threads[1].start()
    wait_until(lambda: bool(told_epoch._monitor._waiters))
    tell_epoch(dataset, 2)
    assert dataset.calls == [0]
    copy = os.fork()
    if not copy:  # where nobody else reads
        again = ToldEpoch.of(dataset)
        os._exit(7 if again is not None and again.read(1, lambda: dataset.calls) == [0, 1] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 7
    may_end.set()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == dataset.calls == [0, 1]


class Refusing(Told):
    error: type[Exception] = ValueError

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if self.calls.count(epoch) == 1:
            raise self.error("not yet")


@pytest.mark.parametrize(("error", "raised"), [(ValueError, ValueError), (StopIteration, RuntimeError)])
def test_one_that_cannot_be_told_is_told_again(error: type[Exception], raised: type[Exception]) -> None:
    dataset = Refusing(3, draws=False)
    dataset.error = error
    told = ToldEpoch.of(dataset)
    assert told is not None
    with pytest.raises(raised):
        told.read(0, lambda: None)
    assert told.read(0, lambda: dataset.epoch) == told.read(0, lambda: dataset.epoch) == 0
    assert dataset.calls == [0, 0]
