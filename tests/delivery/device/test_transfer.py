"""The order of work on streams, in simulations that fail if memory is reused, or a slot goes back, too early."""

import random
import threading
from typing import Any

import pytest
import torch

from accelerators import HostSlots, SimulatedDevice, making
from headrace import prefetch_to_device
from headrace.delivery.device import backends, transfer
from headrace.delivery.device.transfer import Copied, Transfer, Uncopied

CPU = torch.device("cpu")
SEEDS = 100


def train(device: SimulatedDevice, batches: Any, seed: int) -> int:
    """Use batches as a training loop does, which may keep some; return how many it kept at most."""
    draw, kept, most = random.Random(seed), [], 0
    for expected, batch in enumerate(batches):
        (data,) = batch["data"]
        assert batch["number"] == expected
        for _ in range(draw.randrange(4)):
            device.kernel(data, expected)
        if draw.random() < 0.2:
            kept.append((data, expected))
        while kept and draw.random() < 0.3:
            device.kernel(*kept[0])
            del kept[0]
        most = max(most, len(kept))
        del batch, data
    for one in kept:
        device.kernel(*one)
    return most


def simulated(seed: int, monkeypatch: pytest.MonkeyPatch, count: int = 30) -> tuple[SimulatedDevice, int]:
    device, depth = SimulatedDevice(seed), seed % 4
    monkeypatch.setitem(backends.BACKENDS, "cpu", making(device))
    kept = train(device, prefetch_to_device(HostSlots(count), "cpu", depth), seed)
    device.finish()
    # As many as are copied ahead, are used by queued work, are kept, or are being freed.
    assert device.blocks <= depth + transfer._MOST_QUEUED + kept + 3
    return device, depth


def test_nothing_is_reused_before_its_reader_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(SEEDS):
        device, _ = simulated(seed, monkeypatch)
        assert device.wrong == []


def _nothing(*_: Any) -> None:
    """Do nothing."""


def _release_all(self: Transfer) -> None:
    self._sources.clear()


@pytest.mark.parametrize(
    ("where", "name", "mutation", "found"),
    [
        (SimulatedDevice, "mark_used", _nothing, "work on batch"),
        (SimulatedDevice, "wait", _nothing, "work on batch"),
        (Transfer, "_release", _release_all, "the source of batch"),
    ],
)
def test_the_simulation_finds_what_is_left_out(
    where: type, name: str, mutation: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, mutation)
    wrong = [text for seed in range(SEEDS) for text in simulated(seed, monkeypatch)[0].wrong]
    assert any(text.startswith(found) for text in wrong)


def test_memory_is_bounded_by_waiting_where_the_host_is_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for most in (transfer._MOST_QUEUED, 10**9):
        monkeypatch.setattr(transfer, "_MOST_QUEUED", most)
        device = SimulatedDevice(1)
        monkeypatch.setitem(backends.BACKENDS, "cpu", making(device))
        monkeypatch.setattr(device, "advance", lambda until=None, device=device: device.work(until))
        train(device, prefetch_to_device(HostSlots(100), "cpu", 1), 1)
        counts.append(device.blocks)
        device.finish()
        assert device.wrong == []
    assert counts[0] < 20
    assert counts[1] > 80


class FullDevice(SimulatedDevice):
    """Its memory is full while a batch is in use: only one fits."""

    full = True

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.full and self._current == "copies":
            raise torch.OutOfMemoryError("no memory left")
        return super().copy(tensor)


def test_where_memory_runs_out_batches_are_copied_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FullDevice(0)
    monkeypatch.setitem(backends.BACKENDS, "cpu", making(device))
    with pytest.warns(UserWarning, match="memory on cpu ran out") as caught:
        train(device, prefetch_to_device(HostSlots(20), "cpu", 3), 0)
    assert len(caught) == 1
    device.finish()
    assert device.wrong == []


class OneStream(backends.OneStreamBackend):
    """A copy on the CPU is the tensor itself, unless one asks for another."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().copy(tensor.clone())


def test_with_one_stream_batches_are_copied_when_they_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "cpu", OneStream)
    batches = [*prefetch_to_device(HostSlots(20), "cpu", 2)]
    assert [batch["data"][0].item() for batch in batches] == [*range(20)]
    moved = next(iter(prefetch_to_device([Owned(torch.tensor(3))], "cpu")))
    assert moved.data == 3


class Capturing(SimulatedDevice):
    def is_capturing(self) -> bool:
        return True


def test_while_a_graph_is_captured_no_batch_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "cpu", making(Capturing(0)))
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        next(iter(prefetch_to_device(HostSlots(3), "cpu")))


def begun(device: SimulatedDevice) -> Transfer:
    return Transfer(device, CPU, 1, pytest.fail)


def test_a_copy_that_was_interrupted_keeps_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tensor's copy is queued, and a Ctrl-C comes before the second's."""
    device = SimulatedDevice(0)
    monkeypatch.setattr(device, "advance", lambda until=None: None if until is None else device.finish())
    copying, slots = begun(device), HostSlots(2)
    first, second = iter(slots), iter(HostSlots(1))
    batch, other = next(first), next(iter(HostSlots(1)))
    with pytest.MonkeyPatch.context() as patch:
        copies = [device.copy]

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if not copies:
                raise KeyboardInterrupt
            return copies.pop()(tensor)

        patch.setattr(device, "copy", copy)
        with pytest.raises(KeyboardInterrupt):
            copying.start([batch, other])
    del batch, other, first
    copying.start(next(second))
    device.finish()
    assert device.wrong == []
    copying.close()
    assert not copying._sources


def test_closing_waits_for_the_copies() -> None:
    device = SimulatedDevice(3)
    copying = begun(device)
    staged = copying.start(next(iter(HostSlots(1))))
    assert isinstance(staged, Copied)
    copying.close()
    assert staged.done.done
    assert device.wrong == []


def test_a_batch_may_be_handed_over_again() -> None:
    device = SimulatedDevice(1)
    copying = begun(device)
    staged = copying.start(next(iter(HostSlots(1))))
    assert copying.hand_over(staged) is copying.hand_over(staged)
    assert not isinstance(staged, Uncopied)
    device.finish()


class Owned:
    """An object of a user's that knows how it is moved."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def to(self, device: Any) -> "Owned":
        return Owned(self.data.clone())


def test_tensors_that_an_object_makes_are_marked_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(0)
    marked: list[Any] = []
    monkeypatch.setattr(device, "mark_used", lambda tensor, stream: stream == "main" and marked.append(tensor))
    copying = begun(device)
    batch = copying.hand_over(copying.start([Owned(torch.tensor([7]))]))
    assert [one is batch[0].data for one in marked] == [True]
    device.finish()


def test_another_thread_is_no_part_of_it() -> None:
    """Tensors that other threads make meanwhile are not the batch's."""
    made, done = transfer._Made(CPU), threading.Event()
    with made:
        thread = threading.Thread(target=lambda: (torch.zeros(1).clone(), done.set()))
        thread.start()
        assert done.wait(60)
    thread.join(60)
    assert made.tensors == []
