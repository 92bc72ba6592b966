"""Ranks under DistributedDataParallel, each with its own Ray workers, all in one cluster.

ray start --head                    # once, on the first machine; others: ray start --address=<what it printed>
torchrun --nproc-per-node=2 examples/ray_ddp.py --executor ray
"""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from headrace import DataLoader


class Shaken(Dataset):
    """Digits, shifted by up to a pixel, with noise: other random numbers would train other weights."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        down, right = torch.randint(-1, 2, (2,)).tolist()
        image = self.images[index].roll((down, right), (1, 2))
        return image + 0.1 * torch.randn(image.shape), self.labels[index]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", default="inline", choices=["inline", "process", "ray"])
    parser.add_argument("--epochs", default=12, type=int)
    given = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same split and the same first weights on every rank
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    train, test = torch.randperm(len(labels)).split([1408, 389])

    # Each rank reads its share: no DistributedSampler, no set_epoch. It asks the cluster at RAY_ADDRESS, or one on its
    # machine, for its own workers; the batches are those that it would have made itself.
    shaken = Shaken(images[train], labels[train])
    options = {"num_workers": 1, "persistent_workers": True, "executor": given.executor}
    loader = DataLoader(shaken, batch_size=64 // dist.get_world_size(), shuffle=True, seed=0, **options)
    held_out = DataLoader(TensorDataset(images[test], labels[test]), batch_size=64, tail="exact")

    layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    started = time.perf_counter()
    for _ in range(given.epochs):
        figures = torch.zeros(4, dtype=torch.float64)  # loss, trained on, right, tested
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            figures[:2] += torch.tensor([loss.item() * len(y), len(y)])
    seconds = time.perf_counter() - started

    model.eval()
    with torch.no_grad():
        for x, y in held_out:
            # model.module: a rank may have one batch less, so nothing in this loop may wait for other ranks.
            figures[2:] += torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(figures)
    if dist.get_rank() == 0:
        loss, trained, right, tested = figures.tolist()
        print(f"accuracy {right / tested!r}, loss {loss / trained!r}, {seconds:.1f} s")
    del model  # else it holds the last reference to the group, and torch can deadlock when it frees both
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
