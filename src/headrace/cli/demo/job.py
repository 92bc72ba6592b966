"""The script that each rank of `headrace demo` runs: a user's training script that also records what it read."""

import hashlib
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler, TensorDataset

from headrace.cli.demo import packed
from headrace.cli.demo.digits import BATCH_SIZE, CLASSES, TRAINING, load, network, part
from headrace.cli.demo.launch import collect_from_ranks, tell_once
from headrace.executors import RayExecutor
from headrace.executors.process.peer import state_of
from headrace.loader import DataLoader
from headrace.plan import Balanced

EPOCHS = 8
GLOBAL_BATCH = 48
DIGEST_EPOCHS = 2

RAY_WORKERS = 2
KILL_STEP = 20

_KILLED_S = 30.0
"""How long a killed worker may take to end, in seconds."""

_ENDED = ("", "Z", "X")
"""The states of a process that has ended, or of which the system tells no state."""


def main() -> None:
    """Run the tasks that the arguments name, one after the other, in this rank. Some have a folder: "pack:FOLDER"."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        for task in sys.argv[1:]:
            name, _, folder = task.partition(":")
            TASKS[name](*([folder] if folder else []))
    finally:
        dist.destroy_process_group()


def train() -> None:
    """Train, evaluate, and read balanced batches; rank 0 prints the facts."""
    training, test = load()
    tell_once("data", training=len(training), test=len(test))
    net = network()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(training, batch_size=BATCH_SIZE, shuffle=True)
    for epoch in range(EPOCHS):
        total = torch.zeros(2)  # loss, samples
        read: list[int] = []
        for indices, images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += torch.tensor([loss.item() * len(labels), len(labels)])
            read += indices.tolist()
        dist.all_reduce(total)
        shares = collect_from_ranks(read)
        times = Counter(index for share in shares for index in share)
        tell_once(
            "epoch",
            epoch=epoch,
            loss=float(total[0] / total[1]),
            shares=[len(share) for share in shares],
            repeated=sum(count - 1 for count in times.values()),
            missing=len(set(range(len(training))) - times.keys()),
            order=hashlib.sha256(str(shares).encode()).hexdigest(),
        )
    evaluate(net, test)
    balance(training)


def evaluate(model: nn.Module, test: TensorDataset) -> None:
    """Count the right answers of one process, of ranks with torch's sampler, and of ranks with headrace."""
    model.eval()
    alone = _answers(model, torch.utils.data.DataLoader(test, BATCH_SIZE))
    sampler: DistributedSampler[Any] = DistributedSampler(test, shuffle=False)
    theirs = _answers(model, torch.utils.data.DataLoader(test, BATCH_SIZE, sampler=sampler))
    ours = _answers(model, DataLoader(test, BATCH_SIZE, tail="exact"))
    for shares in [alone], collect_from_ranks(theirs), collect_from_ranks(ours):
        answers = [answer for share in shares for answer in share]
        correct, distinct = sum(right for _, right in answers), len({index for index, _ in answers})
        tell_once("test", correct=correct, counted=len(answers), distinct=distinct)


def _answers(model: nn.Module, loader: torch.utils.data.DataLoader[Any]) -> list[tuple[int, bool]]:
    """Return the index of each sample that this rank read, and whether the model's answer is right."""
    with torch.no_grad():
        return [
            answer
            for indices, images, labels in loader
            for answer in zip(indices.tolist(), (model(images).argmax(1) == labels).tolist(), strict=True)
        ]


def balance(training: TensorDataset) -> None:
    """Read balanced batches of a set in which nine in ten of the digits 0 to 4 are missing."""
    _, images, labels = training.tensors
    rare = labels < CLASSES // 2
    kept = torch.cat([rare.nonzero()[::10, 0], (~rare).nonzero()[:, 0]])
    cut = part(images, labels, kept)
    batch_size = 2 * CLASSES
    counts = [
        torch.bincount(batch, minlength=CLASSES).tolist()
        for _, _, batch in DataLoader(cut, batch_size=batch_size, order=Balanced(labels[kept].tolist()))
    ]
    ranks = [[one for one in theirs if sum(one) == batch_size] for theirs in collect_from_ranks(counts)]
    tell_once(
        "balanced",
        data=torch.bincount(labels[kept], minlength=CLASSES).tolist(),
        first=[theirs[0] for theirs in ranks],
        batches=sum(len(theirs) for theirs in ranks),
        spread=max(max(one) - min(one) for theirs in ranks for one in theirs),
    )


def digest() -> None:
    """Print a digest of the samples in each global batch, whichever rank read them."""
    ranks = dist.get_world_size()
    # Without seed= a single rank would draw one; several ranks take 0.
    numbers = TensorDataset(torch.arange(TRAINING))
    loader = DataLoader(numbers, GLOBAL_BATCH // ranks, shuffle=True, seed=0, tail="exact")
    sha = hashlib.sha256()
    steps = samples = 0
    for _ in range(DIGEST_EPOCHS):
        for parts in zip_longest(*collect_from_ranks([indices.tolist() for (indices,) in loader]), fillvalue=[]):
            batch = np.sort(np.concatenate([np.asarray(part, "<i8") for part in parts]))
            sha.update(np.asarray(len(batch), "<i8").tobytes() + batch.tobytes())
            steps += 1
            samples += len(batch)
    tell_once("digest", batch_size=loader.batch_size, steps=steps, samples=samples, digest=sha.hexdigest())


class Noisy(Dataset[Any]):
    """Training images with random noise, and the process that drew it.

    Args:
        training: The images.
    """

    def __init__(self, training: TensorDataset) -> None:
        self.training = training

    def __len__(self) -> int:
        return len(self.training)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor, int]:
        _, image, label = self.training[index]
        return index, image + 0.1 * torch.randn(image.shape), label, os.getpid()


def on_ray() -> None:
    """Print digests of an epoch that is made here, and of the same one made on Ray while a worker is killed."""
    import ray  # noqa: PLC0415 - only this needs the extra

    noisy = Noisy(load()[0])
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 0}
    here = _bits(DataLoader(noisy, **options))
    os.environ.setdefault("RAY_worker_niceness", "0")  # otherwise they get only CPU time that other processes leave
    # Ray's sockets lie in this folder, and their paths must be short. Its logs lie there, too, and are deleted with it.
    place = "/tmp" if os.path.isdir("/tmp") else None
    with tempfile.TemporaryDirectory(prefix="headrace-", dir=place, ignore_cleanup_errors=True) as folder:
        ray.init("local", num_cpus=RAY_WORKERS, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        try:
            loader = DataLoader(noisy, num_workers=RAY_WORKERS, executor=RayExecutor(idle_s=0), **options)
            there = _bits(loader, KILL_STEP)
            died = loader.stats().restarts
        finally:
            ray.shutdown()
    tell_once("ray", steps=len(loader), kill_step=KILL_STEP, died=died, here=here, there=there)


def _bits(loader: DataLoader[Any], kill_step: int | None = None) -> str:
    """Return a digest of every bit of an epoch; after the given step kill the process that made its batch."""
    sha = hashlib.sha256()
    for step, (*tensors, processes) in enumerate(loader):
        for tensor in tensors:
            sha.update(tensor.numpy().tobytes())
        if step == kill_step:
            _kill(int(processes[0]))
    return sha.hexdigest()


def _kill(pid: int) -> None:
    """Kill a process and wait until it has ended: on a busy machine the epoch might end before that."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILLED_S
    while state_of(pid) not in _ENDED and time.monotonic() < deadline:
        time.sleep(0.01)


TASKS: dict[str, Callable[..., None]] = {
    "train": train,
    "digest": digest,
    "ray": on_ray,
    "pack": packed.pack,
    "memory": packed.train_from_memory,
    "shards": packed.train_from_shards,
}

if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Torch never frees the group of a DistributedDataParallel model. If one of its threads drops a tensor while the
    # interpreter ends, the process aborts; _exit ends the process without that.
    os._exit(0)
