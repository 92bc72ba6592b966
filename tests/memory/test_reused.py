"""Memory of earlier batches for new ones: only when nothing uses it any more, and with the batches that torch makes."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from headrace import DataLoader
from headrace.errors import SlotTooLarge
from headrace.memory import reused
from headrace.memory.reused import BatchMemory, reusing_collate
from headrace.memory.slots import BufferPool

ROWS, LEAST = 1000, 2**15
EXECUTORS = [{"num_workers": 0}, {"num_workers": 2, "executor": "thread"}]


@pytest.fixture(autouse=True)
def _small_tensors_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reused, "_LEAST_BYTES", LEAST)


class Samples(Dataset[Any]):
    """Each sample is full of its number; ten are large enough together, their numbers are not."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.full((ROWS,), float(index)), "number": index}


def right(batch: Any) -> bool:
    return bool((batch["image"] == batch["number"][:, None]).all())


@pytest.fixture
def collate() -> Callable[[Any], Any]:
    return reusing_collate(BatchMemory())


@pytest.mark.parametrize("options", EXECUTORS, ids=["inline", "thread"])
def test_memory_is_used_again(options: dict[str, Any]) -> None:
    seen = []
    for batch in DataLoader(Samples(), 10, seed=1, shuffle=True, **options):
        assert right(batch)
        seen.append(batch["image"].data_ptr())
    assert len(set(seen)) < len(seen) / 2


@pytest.mark.parametrize("options", EXECUTORS, ids=["inline", "thread"])
def test_batches_that_are_kept_stay_as_they_are(options: dict[str, Any]) -> None:
    kept = list(DataLoader(Samples(), 10, **options))
    assert all(map(right, kept))
    assert len({batch["image"].data_ptr() for batch in kept}) == len(kept) == 100


@pytest.mark.parametrize("part", [lambda image: image[3:4], torch.Tensor.numpy, torch.Tensor.untyped_storage])
def test_whatever_lies_over_it_keeps_it(part: Callable[[Any], Any]) -> None:
    reader = iter(DataLoader(Samples(), 10))
    next(reader)
    kept = part(next(reader)["image"])
    before = kept.tolist()
    assert all(map(right, reader))
    assert kept.tolist() == before


def test_a_forked_process_keeps_its_batch() -> None:
    reader = iter(DataLoader(Samples(), 10))
    batch = [next(reader) for _ in range(2)][1]
    gate, opener = os.pipe()
    child = os.fork()
    if not child:
        os.read(gate, 1)
        os._exit(3 if right(batch) else 4)
    del batch
    assert all(map(right, reader))
    os.write(opener, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    os.close(gate)
    os.close(opener)


def test_small_tensors_are_left_to_torch(collate: Callable[[Any], Any]) -> None:
    samples = [Samples()[index] for index in range(10)]
    batches = [collate(samples) for _ in range(3)]
    resizable = [{name: part.untyped_storage().resizable() for name, part in batch.items()} for batch in batches]
    assert resizable == [{"image": True, "number": True}] + 2 * [{"image": False, "number": True}]


UNUSUAL = {
    "permuted": lambda: [torch.rand(64, 64, 3).permute(2, 0, 1) for _ in range(4)],
    "channels last": lambda: [torch.rand(2, 3, 64, 64).to(memory_format=torch.channels_last) for _ in range(4)],
    "promoted": lambda: [torch.rand(20_000), torch.rand(20_000, dtype=torch.float64)],
    "with gradients": lambda: [torch.rand(20_000, requires_grad=True), torch.rand(20_000)],
    "a parameter": lambda: [torch.nn.Parameter(torch.rand(20_000)) for _ in range(2)],
    "arrays": lambda: [np.random.default_rng(0).random((100, 100)) for _ in range(4)],
    "bfloat16": lambda: [torch.rand(20_000).bfloat16() for _ in range(2)],
    "complex": lambda: [torch.rand(20_000, dtype=torch.complex64).conj() for _ in range(2)],
    "two large tensors": lambda: [(torch.rand(20_000), torch.rand(30_000)) for _ in range(2)],
    "no dimension": lambda: [torch.tensor(index) for index in range(20_000)],
    "nothing in them": lambda: [torch.rand(0, 20_000) for _ in range(4)],
}


@pytest.mark.parametrize("samples", UNUSUAL.values(), ids=UNUSUAL)
def test_batches_are_those_of_torch(samples: Callable[[], Any], collate: Callable[[Any], Any]) -> None:
    for _ in range(3):
        made = samples()
        ours, theirs = collate(made), default_collate(made)
        for mine, other in zip(
            *((one if type(one) in (list, tuple) else [one]) for one in (ours, theirs)), strict=True
        ):
            assert (type(mine), mine.dtype, mine.layout, mine.requires_grad) == (
                *(type(other), other.dtype, other.layout, other.requires_grad),
            )
            assert torch.equal(mine, other)
            assert mine.stride() == other.stride()


@pytest.mark.parametrize(
    "samples",
    [
        [torch.rand(20_000), torch.rand(20_001)],
        [torch.rand(20_000), 3],
        [torch.eye(100).to_sparse()] * 2,
        [torch.nested.nested_tensor([torch.rand(20_000)])] * 2,
    ],
    ids=["sizes", "types", "sparse", "nested"],
)
def test_errors_are_those_of_torch(samples: Any, collate: Callable[[Any], Any]) -> None:
    with pytest.raises((RuntimeError, TypeError)) as theirs:
        default_collate(samples)
    for _ in range(2):
        with pytest.raises(theirs.type) as ours:
            collate(samples)
        assert str(ours.value) == str(theirs.value)


def test_a_users_rule_for_tensors_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {torch.Tensor: lambda batch, *, collate_fn_map: "the user's"}
    monkeypatch.setattr(reused.torch_collate, "default_collate_fn_map", rules)
    assert reusing_collate(BatchMemory())([torch.rand(20_000)] * 2) == "the user's"


def test_unused_memory_is_bounded() -> None:
    memory = BatchMemory()
    collate = reusing_collate(memory)
    samples = [torch.rand(20_000)] * 2
    kept = [collate(samples) for _ in range(11)]
    assert len(memory._pool.sizes()) == 10
    kept.clear()
    for _ in range(2):
        collate(samples)
    assert len(memory._pool.sizes()) <= 2 + reused._SPARE


def test_without_memory_torch_allocates(collate: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Any, size: int) -> None:
        raise SlotTooLarge("no memory")

    monkeypatch.setattr(BufferPool, "take", refuses)
    samples = [(torch.rand(20_000), torch.rand(20_000)) for _ in range(2)]
    for _ in range(2):
        assert all(map(torch.equal, collate(samples), default_collate(samples)))


@pytest.mark.parametrize("large", [False, True])
def test_batches_of_in_memory_data(large: bool) -> None:
    data = torch.arange(300 * ROWS).reshape(300, ROWS) if large else torch.arange(300)
    seen = []
    for (batch,) in DataLoader(TensorDataset(data), 10, shuffle=True, seed=1):
        seen.append(batch.untyped_storage().resizable())
        assert batch.ndim == 1 or bool((batch % ROWS == torch.arange(ROWS)).all())
    assert seen == [True, *[not large] * 29]
