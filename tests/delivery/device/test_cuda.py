"""Copies to a real GPU. Without one these tests are skipped; `test_transfer.py` simulates what they rely on."""

import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as Torch
from torch.utils.data import Dataset, TensorDataset

from headrace import DataLoader, prefetch_to_device
from headrace.delivery.device.backends import TorchBackend
from waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

ROWS, WIDTH, BATCH = 96, 250_000, 4
LONG = 2_000_000_000
"""About a second of a kernel that waits, in cycles."""


class Rows(Dataset[torch.Tensor]):
    """Row n holds the number n."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), float(index))


WORKERS: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}


@pytest.mark.parametrize(
    "options", [WORKERS, WORKERS | {"device_prefetch": 4}, {"executor": "thread", "num_workers": 2}, {}], ids=str
)
def test_the_bytes_are_right_whatever_the_stream_does(options: dict[str, Any]) -> None:
    sums = []
    for batch in DataLoader(Rows(), BATCH, device="cuda", seed=0, **options):
        assert batch.device == torch.device("cuda", torch.cuda.current_device())
        torch.cuda._sleep(LONG // 100)  # the batch is read long after the next ones are copied
        sums.append((batch.sum(1) / WIDTH).clone())
        del batch
    assert torch.cat(sums).tolist() == [float(index) for index in range(ROWS)]


def test_a_copy_ends_while_the_callers_stream_is_busy() -> None:
    loader = DataLoader(Rows(), BATCH, device="cuda", seed=0, **WORKERS)
    reader = iter(loader)
    next(reader)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    busy = torch.cuda.Event()
    busy.record()
    batches = [next(reader) for _ in range(3)]
    staged = loader._transfer._sources[-1].done
    wait_until(staged.query)
    assert not busy.query(), "computation was still going on"
    torch.cuda.synchronize()
    assert [batch[:, 0].tolist() for batch in batches] == [[4.0 * n + i for i in range(4)] for n in (1, 2, 3)]


def test_batches_are_copied_from_the_workers_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[torch.Tensor] = []
    copy = TorchBackend.copy
    monkeypatch.setattr(TorchBackend, "copy", lambda self, tensor: sources.append(tensor) or copy(self, tensor))
    reader = iter(DataLoader(Rows(), BATCH, device="cuda", seed=0, **WORKERS))
    next(reader)
    assert sources[0].is_pinned()
    slots = [slot for peer in reader._pool._peers for slot in peer.wire.loans._slots.values()]
    assert any(slot.address <= sources[0].data_ptr() < slot.address + slot.size for slot in slots), "it was copied"


@pytest.mark.parametrize("side", [False, True])
def test_a_pinned_batch_that_is_dropped_at_once_is_copied_all_the_same(side: bool) -> None:
    """`pin_memory=True` alone: the user's copies may be on any stream, and nobody holds their sources."""
    reader = iter(DataLoader(Rows(), BATCH, pin_memory=True, seed=0, **WORKERS))
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        found = [next(reader).to("cuda", non_blocking=True) for _ in range(12)]
    del reader
    torch.cuda.synchronize()
    assert torch.cat(found)[:, 0].tolist() == [float(index) for index in range(48)]


def test_sparse_batches() -> None:
    data = [torch.eye(300).to_sparse() * index for index in range(1, 9)]
    loader = DataLoader(data, None, device="cuda", seed=0, num_workers=1, multiprocessing_context="fork")
    assert [batch.to_dense().sum().item() for batch in loader] == [300.0 * index for index in range(1, 9)]


def test_memory_can_be_registered_again_after_it_was_let_go() -> None:
    for _ in range(5):
        assert sum(len(batch) for batch in DataLoader(Rows(), BATCH, device="cuda", seed=0, **WORKERS)) == ROWS
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def test_a_worker_that_is_replaced_never_touches_the_device() -> None:
    reader = iter(DataLoader(Rows(), BATCH, device="cuda", seed=0, **WORKERS))
    found = [next(reader)]
    os.kill(reader._workers[0].pid, signal.SIGKILL)
    found += reader
    assert torch.cat(found)[:, 0].tolist() == [float(index) for index in range(ROWS)]


def test_no_batch_is_given_while_a_graph_is_captured() -> None:
    reader = iter(DataLoader(Rows(), BATCH, device="cuda", seed=0, **WORKERS))
    next(reader)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        next(reader)
    assert next(reader)[:, 0].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_where_memory_runs_out_batches_are_copied_one_at_a_time() -> None:
    torch.cuda.empty_cache()
    one = BATCH * WIDTH * 4
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 3.5 * one) / total)
    try:
        with pytest.warns(UserWarning, match="ran out while a batch was copied ahead"):
            firsts = [
                batch[0, 0].item()
                for batch in DataLoader(Rows(), BATCH, device="cuda", device_prefetch=6, seed=0, **WORKERS)
            ]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert firsts == [float(index) for index in range(0, ROWS, BATCH)]


def test_batches_of_torchs_loader() -> None:
    data = torch.arange(40.0).repeat_interleave(50_000).reshape(40, 50_000)
    found = [batch.sum(1) for (batch,) in prefetch_to_device(Torch(TensorDataset(data), 4, pin_memory=True), "cuda", 2)]
    assert torch.equal(torch.cat(found).cpu(), data.sum(1))
