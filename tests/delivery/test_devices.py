"""Batches that are staged for a device, in readers and from any iterable."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as Torch
from torch.utils.data import Dataset, TensorDataset

from accelerators import ThreadBackend
from delivery.manual import made
from headrace import DataLoader, prefetch_to_device
from headrace.delivery.device import backends
from waiting import wait_for_reapers


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> list[ThreadBackend]:
    """The accelerators that were made in the place of the CPU."""
    found: list[ThreadBackend] = []

    def make(device: torch.device) -> ThreadBackend:
        found.append(ThreadBackend(device))
        return found[-1]

    monkeypatch.setitem(backends.BACKENDS, "cpu", make)
    return found


def test_what_is_done_is_copied_ahead_and_nothing_waits_for_more(accelerator: list[ThreadBackend]) -> None:
    loader, executor = made(dataset=TensorDataset(torch.arange(12)), device="cpu", device_prefetch=2)
    reader = iter(loader)
    (pool,), (backend,) = executor.pools, accelerator
    pool.complete(0)
    assert next(reader)[0] == 0
    assert backend.copies == 1, "the second batch is not done"
    for number in range(1, 5):
        pool.complete(number)
    assert next(reader)[0] == 1
    assert backend.copies == 4, "two are copied ahead, the fifth is not"
    assert len(pool.submitted) == 8, "their places in the window are taken by others"
    assert loader.state_dict()["samples"] == 2, "what lies staged was not handed over"
    assert loader.stats().batches == 2


def test_an_error_behind_a_staged_batch_comes_in_its_turn(accelerator: list[ThreadBackend]) -> None:
    loader, executor = made(device="cpu")
    reader = iter(loader)
    (pool,) = executor.pools
    pool.complete(0)
    pool.complete(1, error=ValueError("broken"))
    pool.complete(2)
    assert next(reader)["index"] == 0
    with pytest.raises(ValueError, match="broken"):
        next(reader)
    assert next(reader)["index"] == 2


def test_a_batch_that_could_not_be_handed_over_comes_again(
    accelerator: list[ThreadBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, executor = made(device="cpu")
    reader = iter(loader)
    (pool,) = executor.pools
    pool.complete(0)
    with monkeypatch.context() as patch:
        patch.setattr(ThreadBackend, "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(ThreadBackend, "current_stream", lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            next(reader)
    assert loader.state_dict()["samples"] == 0
    assert next(reader)["index"] == 0
    assert loader.state_dict()["samples"] == 1


def test_work_in_the_callers_thread_is_not_ahead(accelerator: list[ThreadBackend]) -> None:
    asked: list[int] = []

    class Noted(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            asked.append(index)
            return torch.tensor(index)

    reader = iter(DataLoader(Noted(), device="cpu", device_prefetch=3))
    assert next(reader) == 0
    assert asked == [0]


def test_the_slots_of_workers_are_pinned_once_and_let_go_before_they_are_unmapped(
    accelerator: list[ThreadBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = type(ThreadBackend.locks)()
    monkeypatch.setattr(ThreadBackend, "locks", locks)
    data = torch.arange(40.0).repeat_interleave(10_000).reshape(40, 10_000)
    loader = DataLoader(TensorDataset(data), 4, num_workers=1, multiprocessing_context="fork", device="cpu")
    found = torch.cat([batch for (batch,) in loader])
    assert torch.equal(found, data)
    assert 1 <= locks.registered <= 6, "not once a batch"
    del loader
    wait_for_reapers()  # which unmap them
    assert locks.held == {}


def test_a_refusal_to_pin_is_said_once(accelerator: list[ThreadBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, size: int) -> None:
        raise RuntimeError("out of locked memory")

    monkeypatch.setattr(ThreadBackend.locks, "register", refuse)
    data = torch.zeros(8, 50_000)
    loader = DataLoader(TensorDataset(data), 1, num_workers=1, multiprocessing_context="fork", device="cpu", seed=0)
    with pytest.warns(UserWarning, match="cannot be registered as pinned .out of locked memory.*ulimit -l") as caught:
        batches = [*loader, *loader]
    assert len([one for one in caught if one.category is UserWarning]) == 1
    assert len(batches) == 16


def test_the_user_may_hold_batches_while_others_are_copied(accelerator: list[ThreadBackend]) -> None:
    data = torch.arange(30.0).repeat_interleave(8_000).reshape(30, 8_000)
    loader = DataLoader(TensorDataset(data), 2, num_workers=2, multiprocessing_context="fork", device="cpu")
    reader, kept = iter(loader), []
    for _ in range(9):
        kept.append(next(reader)[0])
    del reader
    assert torch.equal(torch.cat(kept), data[:18])


def test_prefetch_to_device_gives_an_iterables_batches(accelerator: list[ThreadBackend]) -> None:
    loader = Torch(TensorDataset(torch.arange(10)), 3)
    batches = prefetch_to_device(loader, "cpu", 2)
    assert len(batches) == 4  # type: ignore[arg-type]
    for _ in range(2):
        assert [batch.tolist() for (batch,) in batches] == [batch.tolist() for (batch,) in loader]


def test_prefetch_to_device_raises_errors_in_their_turn(accelerator: list[ThreadBackend]) -> None:
    def broken() -> Any:
        yield torch.tensor(0)
        yield torch.tensor(1)
        raise ValueError("broken")

    reader = iter(prefetch_to_device(broken(), "cpu", 5))
    assert [next(reader), next(reader)] == [0, 1]
    with pytest.raises(ValueError, match="broken"):
        next(reader)


def test_prefetch_to_device_goes_on_after_an_error(accelerator: list[ThreadBackend], monkeypatch: Any) -> None:
    reader = iter(prefetch_to_device([torch.tensor(number) for number in range(4)], "cpu"))
    assert next(reader) == 0
    with monkeypatch.context() as patch:
        patch.setattr(ThreadBackend, "current_stream", lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            next(reader)
    assert [*reader] == [1, 2, 3]


def test_warnings_come_without_workers_too(accelerator: list[ThreadBackend], monkeypatch: Any) -> None:
    def copy(self: ThreadBackend, tensor: torch.Tensor) -> torch.Tensor:
        if self._current is not None:
            raise torch.OutOfMemoryError("full")
        return tensor.clone()

    monkeypatch.setattr(ThreadBackend, "copy", copy)
    with pytest.warns(UserWarning, match="memory on cpu ran out") as caught:
        assert (
            torch.cat([batch for (batch,) in DataLoader(TensorDataset(torch.arange(6)), 2, device="cpu")]).sum() == 15
        )
    assert len(caught) == 1


def test_what_cannot_be_marked_as_used_is_copied_when_it_is_handed_over(accelerator: list[ThreadBackend]) -> None:
    data = [torch.eye(3).to_sparse() * number for number in range(5)]
    batches = [*DataLoader(data, None, device="cpu", num_workers=1, seed=0)]
    assert [batch.to_dense().sum() for batch in batches] == [0, 3, 6, 9, 12]


def test_a_tensor_that_comes_twice_is_copied_once(accelerator: list[ThreadBackend]) -> None:
    data = torch.zeros(3)
    ((one, other),) = prefetch_to_device([(data, data)], "cpu")
    assert one is other
    assert one is not data


class Lazy(Sequence[torch.Tensor]):
    """It makes its tensors when it is asked for them."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: Any) -> torch.Tensor:
        if at >= 3:
            raise IndexError
        return torch.full((2,), at)


def test_tensors_that_are_made_meanwhile_are_told_apart(accelerator: list[ThreadBackend]) -> None:
    (batch,) = prefetch_to_device([[Lazy(), Lazy()]], "cpu")
    assert [[one.tolist() for one in half] for half in batch] == [[[0, 0], [1, 1], [2, 2]]] * 2


def test_on_the_cpu_nothing_is_done() -> None:
    batches = [torch.zeros(2)]
    assert next(iter(prefetch_to_device(batches, "cpu"))) is batches[0]
    loader = DataLoader(TensorDataset(torch.zeros(2)), device="cpu")
    iter(loader)
    assert loader._transfer is None


def test_what_is_refused() -> None:
    for call, error, text in (
        (lambda: prefetch_to_device(3, "cpu"), TypeError, "iterable=3 is not allowed"),
        (lambda: prefetch_to_device([], "quatsch"), ValueError, "device='quatsch' is not allowed"),
        (lambda: prefetch_to_device([], "cpu", -1), ValueError, "depth=-1 is not allowed"),
    ):
        with pytest.raises(error, match=text):
            call()  # type: ignore[no-untyped-call]
