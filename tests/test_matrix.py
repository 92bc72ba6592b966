"""One digest: whoever computes the samples, however many they are, wherever they stop, and whoever is killed."""

import hashlib
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import headrace
from accelerators import ThreadBackend
from headrace import DataLoader, Plan, Shuffled, World
from headrace.delivery.device import backends
from rays import RAY, pids_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:the dataset or collate_fn draws"),
    pytest.mark.filterwarnings("ignore:epoch 0 was abandoned"),
]

LENGTH, BATCH_SIZE, SEED = 53, 3, 11
WORLDS = (1, 2, 3, 4)
RESUMES = ("0", "1", "mid", "last-1", "last")

EXECUTORS: dict[str, dict[str, Any]] = {
    "inline": {"executor": "inline"},
    "thread": {"executor": "thread"},
    "fork": {"multiprocessing_context": "fork"},
    "spawn": {"multiprocessing_context": "spawn"},
    "forkserver": {"multiprocessing_context": "forkserver"},
    "ray": {"executor": RAY},
    "ray-store": {"executor": replace(RAY, shared_memory=False)},
}


class Augmented(Dataset[dict[str, Any]]):
    """Draws from every generator there is, or only from those of the sample's own; large enough for shared memory.

    Args:
        shared: Whether to draw from the process's generators, too, which threads cannot share.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample: dict[str, Any] = {
            "image": torch.rand(50, 60, generator=headrace.torch_rng()) + index,
            "noise": headrace.rng().random(4),
        }
        if self.shared:
            sample |= {"torch": torch.randn(5), "random": random.random(), "numpy": np.random.rand(2)}
        return sample


def augmented(fields: tuple[Any, int]) -> dict[str, Any]:
    """Make a sample of a shard's fields and of random numbers."""
    image, label = fields
    return {
        "image": torch.rand(50, 60, generator=headrace.torch_rng()) + torch.from_numpy(image),
        "random": random.random() + label,
    }


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Samples that draw from all generators; only from their own; and in three tar shards, fewer than most worlds."""
    folder = tmp_path_factory.mktemp("shards")
    with headrace.ShardWriter(folder / "%d.tar", maxcount=20) as writer:
        for number in range(LENGTH):
            writer.write({"__key__": str(number), "npy": np.full((50, 60), number, np.float32), "cls": number})
    tar = headrace.TarDataset(writer.shards, "npy cls", {}, augmented, streams=4, window=7)
    return {"drawing": Augmented(True), "apart": Augmented(False), "tar": tar}


class Stream:
    """What was read of an epoch, by global position."""

    def __init__(self) -> None:
        self.rows: dict[int, bytes] = {}

    def add(self, positions: list[int], batch: dict[str, torch.Tensor]) -> None:
        for place, position in enumerate(positions):
            if position < LENGTH:
                assert position not in self.rows, f"position {position} was read twice"
                self.rows[position] = b"".join(batch[name][place].numpy().tobytes() for name in sorted(batch))

    def digest(self) -> str:
        assert sorted(self.rows) == list(range(LENGTH))
        return hashlib.sha256(b"".join(self.rows[position] for position in range(LENGTH))).hexdigest()


def loader_of(dataset: Any, rank: int, size: int, options: dict[str, Any]) -> Any:
    return DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        shuffle=True,
        seed=SEED,
        tail="exact",
        distributed=World(rank, size),
        **options,
    )


def plan_of(dataset: Any, rank: int, size: int) -> Plan:
    return Plan(getattr(dataset, "order", Shuffled()), LENGTH, BATCH_SIZE, World(rank, size), "exact", SEED)


def begin(dataset: Any, size: int, stops: list[int], kill: bool, options: dict[str, Any]) -> list[tuple[Stream, Any]]:
    """Read up to the last of some steps, on every rank of a world; return what was read before each, and the state."""
    streams = [Stream() for _ in stops]
    states: list[list[Any]] = [[] for _ in stops]
    for rank in range(size):
        loader, plan = loader_of(dataset, rank, size, options), plan_of(dataset, rank, size)
        reader = iter(loader)
        for step in range(stops[-1] + 1):
            for stop, at_stop in zip(stops, states, strict=True):
                if stop == step:
                    at_stop.append(loader.state_dict())
            if step == stops[-1]:
                break
            batch, positions = next(reader), plan.positions(0, step, 0).tolist()
            for stop, stream in zip(stops, streams, strict=True):
                if step < stop:
                    stream.add(positions, batch)
            if kill and step == 0:
                pids = pids_of(reader) or [worker.pid for worker in reader._workers]
                os.kill(pids[rank % len(pids)], signal.SIGKILL)
        reader._shutdown_workers()
    for stop, at_stop in zip(stops, states, strict=True):
        assert at_stop.count(at_stop[0]) == size
        assert at_stop[0]["samples"] == stop * size * BATCH_SIZE
    return [(stream, at_stop[0]) for stream, at_stop in zip(streams, states, strict=True)]


def finish(stream: Stream, dataset: Any, size: int, state: Any, options: dict[str, Any]) -> None:
    """Read the rest of the epoch on every rank of a world."""
    cursor = 0 if state is None else state["samples"]
    for rank in range(size):
        loader, plan = loader_of(dataset, rank, size, options), plan_of(dataset, rank, size)
        if state is not None:
            loader.load_state_dict(state)
        reader = iter(loader)
        for step in range(plan.steps(0, cursor)):
            stream.add(plan.positions(0, step, cursor).tolist(), next(reader))
        assert next(reader, None) is None
        reader._shutdown_workers()


@pytest.fixture(scope="module", autouse=True)
def _accelerator() -> Iterator[None]:
    """Put an accelerator that copies on a thread in the place of the CPU, where a loader has a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends.BACKENDS, "cpu", ThreadBackend)
        yield


@pytest.fixture(scope="module")
def references(datasets: dict[str, Any]) -> dict[str, str]:
    """The digest of each dataset, read in this process."""
    streams = {name: Stream() for name in datasets}
    for name, stream in streams.items():
        finish(stream, datasets[name], 1, None, {"executor": "inline"})
    return {name: stream.digest() for name, stream in streams.items()}


class Cells:
    """Compares cells of the matrix with the digest of their dataset.

    Args:
        datasets: The datasets, by name.
        references: Their digests.
    """

    def __init__(self, datasets: dict[str, Any], references: dict[str, str]) -> None:
        self.datasets = datasets
        self.references = references
        self.compared: list[Any] = []

    def compare(
        self,
        executor: str,
        workers: int,
        name: str,
        size: int,
        resumes: tuple[str, ...],
        kill: bool = False,
        resumed_on: str | None = None,
    ) -> None:
        """Read an epoch once up to the last of some places, and go on in another world from each."""
        count = {} if executor == "inline" else {"num_workers": workers}
        options, resumed = EXECUTORS[executor] | count, EXECUTORS[resumed_on or executor] | count
        whole = LENGTH // (size * BATCH_SIZE)
        places = {"0": 0, "1": 1, "mid": whole // 2, "last-1": whole - 1, "last": whole}
        stops = [places[resume] for resume in resumes]
        dataset = self.datasets[name]
        # What is read before each place is staged for a device; states do not count what lies staged.
        begun = begin(dataset, size, stops, kill, options | {"device": "cpu", "device_prefetch": 2})
        for resume, (stream, state) in zip(resumes, begun, strict=True):
            cell = (executor, workers, name, size, resume, kill)
            finish(stream, dataset, size % len(WORLDS) + 1, state, resumed)
            assert stream.digest() == self.references[name], cell
            self.compared.append(cell)


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest, datasets: dict[str, Any], references: dict[str, str]) -> Iterator[Cells]:
    """How many were compared is printed at the end."""
    compared = Cells(datasets, references)
    yield compared
    digests = ", ".join(f"{name} {digest[:16]}" for name, digest in references.items())
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{len(compared.compared)} cells, one digest a dataset: {digests}")


@pytest.mark.parametrize(
    ("executor", "workers", "name"),
    [
        ("inline", 0, "drawing"),
        *product(("thread", "fork"), (1, 2, 4), ("drawing",)),
        # Threads compute one at a time what draws from generators that they share.
        ("inline", 0, "apart"),
        *product(("thread",), (1, 2, 4), ("apart",)),
        ("fork", 2, "apart"),
        ("inline", 0, "tar"),
        *product(("thread", "fork"), (2,), ("tar",)),
    ],
)
def test_every_cell_has_the_same_digest(cells: Cells, executor: str, workers: int, name: str) -> None:
    for size in WORLDS:
        cells.compare(executor, workers, name, size, RESUMES)
        # A killed worker's samples draw from all generators, those of the sample's own among them.
        if executor == "fork" and name != "apart":
            cells.compare(executor, workers, name, size, ("1",), kill=True)  # stopped before another takes its place
            cells.compare(executor, workers, name, size, ("mid", "last-1", "last"), kill=True)


@pytest.mark.parametrize(
    ("chosen", "name", "resumed_on"),
    [
        ((1, 1, "mid", True), "drawing", "spawn"),
        ((2, 2, "1", False), "drawing", "forkserver"),
        ((4, 1, "last-1", True), "drawing", "forkserver"),
        ((2, 1, "mid", True), "tar", "forkserver"),
    ],
    ids=str,
)
def test_some_cells_that_spawn_have_it_too(
    cells: Cells, chosen: tuple[int, int, str, bool], name: str, resumed_on: str
) -> None:
    """Each worker that is spawned takes seconds, so not all combinations are tried, and some go on in forked ones."""
    workers, size, resume, kill = chosen
    cells.compare("spawn", workers, name, size, (resume,), kill, resumed_on)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("executor", "workers", "name"),
    [
        ("ray", 1, "drawing"),
        ("ray", 2, "drawing"),
        ("ray", 4, "drawing"),
        ("ray-store", 2, "drawing"),
        ("ray", 2, "tar"),
    ],
)
def test_every_cell_on_ray_has_it_too(cells: Cells, executor: str, workers: int, name: str) -> None:
    for size in WORLDS:
        cells.compare(executor, workers, name, size, RESUMES)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("executor", "name", "chosen"),
    [
        ("ray", "drawing", (2, 1, "mid", True)),
        ("ray-store", "drawing", (2, 2, "1", True)),
        ("ray", "tar", (2, 1, "mid", True)),
    ],
)
def test_some_cells_on_ray_have_it_with_kills(cells: Cells, executor: str, name: str, chosen: Any) -> None:
    """Each kill has an actor started anew, seconds apiece."""
    workers, size, resume, kill = chosen
    cells.compare(executor, workers, name, size, (resume,), kill)


def test_another_seed_has_another_digest(datasets: dict[str, Any], references: dict[str, str]) -> None:
    assert len({*references.values()}) == len(references)
    stream = Stream()
    loader = DataLoader(datasets["drawing"], BATCH_SIZE, shuffle=True, seed=SEED + 1)
    for step, batch in enumerate(loader):
        stream.add(list(range(step * BATCH_SIZE, step * BATCH_SIZE + len(batch["noise"]))), batch)
    assert stream.digest() != references["drawing"]
