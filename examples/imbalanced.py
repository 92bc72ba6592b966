"""Weighted sampling of rare classes: torchrun --nproc-per-node=2 examples/imbalanced.py --plot counts.png."""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from headrace import DataLoader, Weighted

COUNTS = 128, 80, 50, 32, 20, 12, 8, 6, 4, 2  # how many zeros, ones, twos, ... are trained on


def train(dataset, test, device, **options):  # returns how often an epoch reads each class, and which part is right
    torch.manual_seed(0)  # the same first weights on every rank
    loader = DataLoader(dataset, 32 // dist.get_world_size(), seed=0, device=device, **options)
    layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    read, right, tested = figures = torch.zeros(3, 10, dtype=torch.int64, device=device)
    for epoch in range(300 // len(loader)):  # about as many steps, however long an epoch is
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            read += torch.bincount(y, minlength=10) * (epoch == 0)
    with torch.no_grad():  # model.module: a rank may have one batch less, so none may wait for the others here
        for x, y in DataLoader(test, 64, tail="exact", device=device):
            right += torch.bincount(y[model.module(x).argmax(1) == y], minlength=10)
            tested += torch.bincount(y, minlength=10)
    dist.all_reduce(figures)
    return read, right / tested


def plot(file, reads):
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the extra `plot`

    axes = (figure := Figure()).subplots()
    for place, (name, read) in enumerate(zip(("shuffled", "weighted", "each once"), reads, strict=True)):
        axes.bar([label + place / 4 for label in range(10)], read.tolist(), width=1 / 4, label=name)
    axes.set(xlabel="class", ylabel="samples that an epoch reads", xticks=range(10))
    axes.legend()
    figure.savefig(file)


def main(file):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**alone)
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    parts = [(labels == label).nonzero()[:, 0].tensor_split([count, 128]) for label, count in enumerate(COUNTS)]
    kept, _, unseen = map(torch.cat, zip(*parts, strict=True))
    sets = [TensorDataset(images[part], labels[part]) for part in (kept, unseen)]
    weights = 1 / torch.tensor(COUNTS)[labels[kept]]  # each class is drawn as often as any other
    few = Weighted(weights, num_samples=100, replacement=False)  # 100 of the 342 samples, each at most once
    ways = {"shuffle": True}, {"order": Weighted(weights)}, {"order": few}
    results = [train(*sets, device, **way) for way in ways]
    if dist.get_rank() == 0:
        print("| class | shuffled | right | weighted | right | each once | right |\n" + "| --- " * 7 + "|")
        for label in range(10):
            cells = [f"{read[label]} | {right[label]:.2f}" for read, right in results]
            print(f"| {label} | {' | '.join(cells)} |")
        print("mean of the classes:", *(f"{right.mean():.3f}" for _, right in results))
        if file:
            plot(file, [read for read, _ in results])
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", metavar="FILE", help="a PNG of the samples that an epoch reads")
    main(parser.parse_args().plot)
