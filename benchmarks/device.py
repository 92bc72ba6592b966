"""To the device without waiting: no gap between epochs, and, on a machine with a GPU, copies beside computation."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader as Torch
from torch.utils.data import Dataset

from benchmarks.rows import Row, compared, in_turn
from headrace import DataLoader, prefetch_to_device

RUNS = 5
LOAD_S = 0.015
STEP_S = 0.020
STEPS, EPOCHS = 10, 20
BATCHES = 60
LARGE = (64, 3, 224, 224)
"""The shape of a batch of 38 MB of float32."""


class Slow(Dataset[torch.Tensor]):
    """Each sample takes some milliseconds, which are waited for."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LOAD_S)
        return torch.tensor(index)


class Large(Dataset[torch.Tensor]):
    """Samples that cost nothing."""

    def __init__(self) -> None:
        self.sample = torch.rand(LARGE[1:])

    def __len__(self) -> int:
        return LARGE[0] * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def busy(seconds: float) -> None:
    """Take this long on the CPU, as CUDA's synchronisation does by default."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def per_step(make: Callable[[], Any], step: Callable[[float], None]) -> tuple[float, ...]:
    """Return the milliseconds of a step over all epochs of a new loader, from the first batch on."""
    loader, start = make(), 0.0
    for _ in range(EPOCHS):
        for _ in loader:
            start = start or time.perf_counter()
            step(STEP_S)
    return ((time.perf_counter() - start) * 1e3 / STEPS / EPOCHS,)


def device() -> Iterator[Row]:
    """Measure the gaps between epochs; and copies, where there is a GPU."""
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    name = "20 epochs of 10 steps of 20 ms, 15 ms to load a batch, a step"
    for step, kind in ((time.sleep, ""), (busy, ", on a busy CPU")):
        ways: dict[str, Any] = {
            "ours": partial(DataLoader, Slow(), seed=0, **options),
            "torch": partial(Torch, Slow(), **options),
            "steps alone": _Steps,
        }
        taken = in_turn({way: partial(per_step, make, step) for way, make in ways.items()}, RUNS)
        for rival in ("torch", "steps alone"):
            yield from compared({name + kind: "ms"}, taken["ours"], taken[rival], rival)
    if torch.cuda.is_available():
        yield from _copies()


class _Steps:
    """Batches that are there at once."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(STEPS))


def _copies() -> Iterator[Row]:
    """Measure copies beside computation, and how much of the link's bandwidth they reach."""
    workers: dict[str, Any] = {"num_workers": 4, "persistent_workers": True}
    matrix = torch.rand(4096, 4096, device="cuda")
    pinned = torch.rand(LARGE).pin_memory()
    link_s = _timed(lambda: [pinned.to("cuda", non_blocking=True) for _ in range(20)]) / 20
    steps = max(1, round(2 * link_s / (_timed(lambda: [matrix @ matrix for _ in range(20)]) / 20)))
    batches: dict[str, Any] = {
        "ours": DataLoader(Large(), LARGE[0], seed=0, device="cuda", **workers),
        "torch": _Moved(Torch(Large(), LARGE[0], pin_memory=True, **workers)),
        "torch, prefetch_to_device": prefetch_to_device(Torch(Large(), LARGE[0], pin_memory=True, **workers), "cuda"),
    }
    taken = in_turn({name: partial(_trained, one, matrix, steps) for name, one in batches.items()}, RUNS)
    alone = in_turn({"": lambda: _trained([pinned.to("cuda")] * BATCHES, matrix, steps)}, RUNS)[""]
    name = "38 MB to a GPU beside computation of twice the copy's time, a step"
    for rival in ("torch", "torch, prefetch_to_device"):
        yield from compared({name: "ms"}, taken["ours"], taken[rival], rival)
    yield from compared({name: "ms"}, taken["ours"], alone, "computation alone")
    taken = in_turn({name: partial(_trained, one, matrix, 0) for name, one in batches.items()}, RUNS)
    link = [(link_s * 1e3,)] * RUNS
    yield from compared({"38 MB to a GPU, nothing else": "ms"}, taken["ours"], link, "a copy from pinned memory")
    yield from compared({"38 MB to a GPU, nothing else": "ms"}, taken["ours"], taken["torch"], "torch")


class _Moved:
    """Batches that are moved as it is usually written."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (batch.to("cuda", non_blocking=True) for batch in self._loader)


def _timed(run: Any) -> float:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _trained(batches: Any, matrix: torch.Tensor, steps: int) -> tuple[float, ...]:
    """Return the milliseconds of a step: so many products, and the sum of the batch."""
    reader, count = iter(batches), 0
    for _ in range(5):
        next(reader)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for batch in reader:
        count += 1
        for _ in range(steps):
            matrix @ matrix
        batch.sum()
    torch.cuda.synchronize()
    return ((time.perf_counter() - start) * 1e3 / count,)
