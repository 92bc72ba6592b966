"""What each worker of a `TorchTrainer` runs: killed after a checkpoint, resumed, and read beside an undisturbed loader.

The modules are named from the tests' folder, since Ray's workers import them.
"""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch

from headrace import DataLoader
from integrations.jobs.noted import Noted, rows
from launch import report
from rays import RAY

SAMPLES = 23
BATCH_SIZE = 2
STEPS_BEFORE = 8
"""The steps before the checkpoint. An epoch has six."""


def a_loader(dataset: Noted, executor: Any = "thread") -> DataLoader[Any]:
    return DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=1, executor=executor)


def train(config: dict[str, str]) -> None:
    """Train for three epochs, and report what was read; the first time one rank is killed after the checkpoint."""
    rank, dataset = ray.train.get_context().get_world_rank(), Noted(SAMPLES)
    loader = a_loader(dataset)
    model = ray.train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as kept:
            state = torch.load(f"{kept}/state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        loader.load_state_dict(state["loader"])
    steps, epochs = 0, []
    while loader.epoch < 3:
        epochs.append([])
        for batch in loader:
            epochs[-1] += rows([batch])
            optimizer.zero_grad()
            model(batch["noise"].float()[:, None]).square().mean().backward()
            optimizer.step()
            steps += 1
            if not checkpoint and steps == STEPS_BEFORE:
                report(config["before"], rank, epochs)
                save(rank, {"model": model.state_dict(), "loader": loader.state_dict()})
            if not checkpoint and steps > STEPS_BEFORE and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    found = {"epochs": epochs, "made by threads": dataset.made_by_threads(), **undisturbed(), **prepared()}
    if rank == 0:
        found["on ray"] = rows(a_loader(Noted(SAMPLES), RAY))
    report(config["resumed"], rank, found)


def save(rank: int, state: dict[str, Any]) -> None:
    """Report a checkpoint of rank 0's, and return when it will be found after a failure."""
    with tempfile.TemporaryDirectory() as kept:
        if rank == 0:
            torch.save(state, Path(kept) / "state.pt")
        ray.train.report({}, checkpoint=ray.train.Checkpoint(kept) if rank == 0 else None)
    assert ray.train.get_all_reported_checkpoints()


def undisturbed() -> dict[str, Any]:
    loader = a_loader(Noted(SAMPLES))
    return {"whole": [rows(loader) for _ in range(3)]}


def prepared() -> dict[str, Any]:
    """Return what `prepare_data_loader` does to a loader, with and without the moving to a device."""
    first, second, dataset = a_loader(Noted(SAMPLES)), a_loader(Noted(SAMPLES)), Noted(SAMPLES)
    around = ray.train.torch.prepare_data_loader(second)
    next(iter(around))
    return {
        "left alone": ray.train.torch.prepare_data_loader(first, move_to_device=False) is first,
        "wrapped": around._dataloader is second,
        "samples in the state after one batch": second.state_dict()["samples"],
        "through the wrapper": rows(ray.train.torch.prepare_data_loader(a_loader(dataset))),
        "made by threads for the wrapper": dataset.made_by_threads(),
    }
