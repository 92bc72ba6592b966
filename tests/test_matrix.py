"""One digest: whoever computes the samples, however many they are, wherever they stop, and whoever is killed."""

import functools
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
from headrace import DataLoader, Plan, Shuffled, World
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


def read(
    stream: Stream, dataset: Any, size: int, state: dict[str, Any] | None, steps: int | None, kill: bool, **options: Any
) -> dict[str, Any]:
    """Read so many steps, or all, on every rank of a world; return the state."""
    cursor = 0 if state is None else state["samples"]
    states = []
    for rank in range(size):
        loader: Any = DataLoader(
            dataset,
            batch_size=BATCH_SIZE,
            shuffle=True,
            seed=SEED,
            tail="exact",
            distributed=World(rank, size),
            **options,
        )
        if state is not None:
            loader.load_state_dict(state)
        plan = Plan(Shuffled(), LENGTH, BATCH_SIZE, World(rank, size), "exact", SEED)
        reader = iter(loader)
        for step in range(plan.steps(0, cursor) if steps is None else min(steps, plan.steps(0, cursor))):
            stream.add(plan.positions(0, step, cursor).tolist(), next(reader))
            if kill and step == 0:
                pids = pids_of(reader) or [worker.pid for worker in reader._workers]
                os.kill(pids[rank % len(pids)], signal.SIGKILL)
        if steps is None:  # a rank learns that its share is read by asking for more
            assert next(reader, None) is None
        states.append(loader.state_dict())
        reader._shutdown_workers()
    assert states.count(states[0]) == size
    return states[0]


def digest_of(
    dataset: Any, size: int, resume: str, kill: bool, options: dict[str, Any], resumed: dict[str, Any]
) -> str:
    """Read an epoch that is stopped somewhere, and gone on with in another world; return the stream's digest."""
    stream = Stream()
    whole = LENGTH // (size * BATCH_SIZE)
    stop = {"0": 0, "1": 1, "mid": whole // 2, "last-1": whole - 1, "last": whole}[resume]
    state = read(stream, dataset, size, None, stop, kill, **options)
    assert state["samples"] == stop * size * BATCH_SIZE
    read(stream, dataset, size % len(WORLDS) + 1, state, None, kill, **resumed)
    return stream.digest()


@functools.cache
def reference(shared: bool) -> str:
    stream = Stream()
    read(stream, Augmented(shared), 1, None, None, False, executor="inline")
    return stream.digest()


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Those that were compared; how many is printed at the end."""
    compared: list[Any] = []
    yield compared
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{len(compared)} cells, one digest a dataset: {reference(True)[:16]}, {reference(False)[:16]}")


def compare(
    cells: list[Any], executor: str, workers: int, shared: bool, chosen: Any, resumed_on: str | None = None
) -> None:
    count = {} if executor == "inline" else {"num_workers": workers}
    options, resumed = EXECUTORS[executor] | count, EXECUTORS[resumed_on or executor] | count
    for size, resume, kill in chosen:
        found = digest_of(Augmented(shared), size, resume, kill, options, resumed)
        assert found == reference(shared), (executor, workers, size, resume, kill)
        cells.append((executor, workers, size, resume, kill))


@pytest.mark.parametrize(
    ("executor", "workers", "shared"),
    [
        ("inline", 0, True),
        *product(("thread", "fork"), (1, 2, 4), (True,)),
        # Threads compute one at a time what draws from generators that they share.
        ("inline", 0, False),
        *product(("thread",), (1, 2, 4), (False,)),
        ("fork", 2, False),
    ],
)
def test_every_cell_has_the_same_digest(cells: list[Any], executor: str, workers: int, shared: bool) -> None:
    # A killed worker's samples draw from all generators, those of the sample's own among them.
    kills = (False, True) if executor == "fork" and shared else (False,)
    compare(cells, executor, workers, shared, product(WORLDS, RESUMES, kills))


@pytest.mark.parametrize(
    ("chosen", "resumed_on"),
    [((1, 1, "mid", True), "spawn"), ((2, 2, "1", False), "forkserver"), ((4, 1, "last-1", True), "forkserver")],
    ids=str,
)
def test_some_cells_that_spawn_have_it_too(
    cells: list[Any], chosen: tuple[int, int, str, bool], resumed_on: str
) -> None:
    """Each worker that is spawned takes seconds, so not all combinations are tried, and some go on in forked ones."""
    workers, size, resume, kill = chosen
    compare(cells, "spawn", workers, True, [(size, resume, kill)], resumed_on)


@pytest.mark.ray
@pytest.mark.parametrize(("executor", "workers"), [("ray", 1), ("ray", 2), ("ray", 4), ("ray-store", 2)])
def test_every_cell_on_ray_has_it_too(cells: list[Any], executor: str, workers: int) -> None:
    compare(cells, executor, workers, True, product(WORLDS, RESUMES, (False,)))


@pytest.mark.ray
@pytest.mark.parametrize(
    ("executor", "chosen"), [("ray", (2, 1, "mid", True)), ("ray-store", (2, 2, "1", True))], ids=["ray", "ray-store"]
)
def test_some_cells_on_ray_have_it_with_kills(cells: list[Any], executor: str, chosen: Any) -> None:
    """Each kill has an actor started anew, seconds apiece."""
    workers, size, resume, kill = chosen
    compare(cells, executor, workers, True, [(size, resume, kill)])


def test_another_seed_has_another_digest() -> None:
    assert reference(True) != reference(False)
    stream = Stream()
    for batch, step in zip(
        DataLoader(Augmented(True), BATCH_SIZE, shuffle=True, seed=SEED + 1), range(99), strict=False
    ):
        stream.add(list(range(step * BATCH_SIZE, step * BATCH_SIZE + len(batch["noise"]))), batch)
    assert stream.digest() != reference(True)
