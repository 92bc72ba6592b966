"""Tasks of the demonstration: training from tar shards, which is killed and goes on; and the same from memory."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from headrace.cli.demo.digits import BATCH_SIZE, load, network
from headrace.cli.demo.launch import collect_from_ranks, tell_once
from headrace.loader import DataLoader
from headrace.shards import ShardWriter, TarDataset

SHARD_SAMPLES = 60
EPOCHS = 2
SAVE_EVERY = 10
KILL_STEP = 45
"""After this step of all epochs the last rank is killed. An epoch has 30 steps."""


def pack(folder: str) -> None:
    """Write the training images into tar shards, in rank 0."""
    if dist.get_rank() == 0:
        training, _ = load()
        with ShardWriter(f"{folder}/digits-%02d.tar", SHARD_SAMPLES) as writer:
            for index, image, label in zip(*training.tensors, strict=True):
                sample = {"npy": (image[0] * 16).byte().numpy(), "cls": int(label)}
                writer.write({"__key__": f"{int(index):04}", **sample})
        tell_once("packed", shards=len(writer.shards), samples=writer.total)
    dist.barrier()


def train_from_memory(folder: str) -> None:
    """Train on images in memory, in the order of the shards."""
    _, images, labels = load()[0].tensors
    loader = DataLoader(TensorDataset(images, labels), BATCH_SIZE, order=_shards(folder).order)
    _train("memory", loader)


def train_from_shards(folder: str) -> None:
    """Train on images in shards, and save what is needed to go on; the first time a rank is killed in the middle."""
    loader = DataLoader(_shards(folder), BATCH_SIZE, shuffle=True, num_workers=1)
    _train("shards", loader, Path(folder, f"rank-{dist.get_rank()}.pt"))


def _shards(folder: str) -> TarDataset:
    return TarDataset(f"{folder}/digits-*.tar", "npy cls", decode={}, transform=_sample)


def _sample(fields: tuple[Any, int]) -> tuple[Tensor, int]:
    image, label = fields
    return torch.from_numpy(image).float()[None] / 16, label


def _train(fact: str, loader: DataLoader[Any], checkpoint: Path | None = None) -> None:
    """Train, and print digests of every bit of the batches, a rank each, and of the network at the end."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    step = begun = 0
    digest = b""
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step, digest = saved["step"], saved["digest"]
        begun = step
    model = DistributedDataParallel(net)
    for _ in range(loader.state_dict()["epoch"], EPOCHS):
        for images, labels in loader:
            digest = hashlib.sha256(digest + images.numpy().tobytes() + labels.numpy().tobytes()).digest()
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            if checkpoint is None:
                continue
            if step % SAVE_EVERY == 0:
                states = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
                torch.save({**states, "step": step, "digest": digest}, checkpoint)
                dist.barrier()
            if step == KILL_STEP and not begun and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    weights = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
    tell_once(
        fact,
        begun=begun,
        steps=step,
        digests=collect_from_ranks(digest.hex()),
        weights=hashlib.sha256(weights).hexdigest(),
    )
