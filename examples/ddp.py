"""A small, complete DDP script: torchrun --nproc-per-node=2 examples/ddp.py."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset, random_split

from headrace import DataLoader


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same split and the same first weights on every rank

    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [0.8, 0.2])

    # No DistributedSampler is needed: every rank reads its share of an epoch.
    loader = DataLoader(train, batch_size=32, shuffle=True, num_workers=1, persistent_workers=True)
    # DistributedSampler would count some test samples twice. Exact shares differ by up to one sample.
    held_out = DataLoader(test, batch_size=32, tail="exact")

    layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(12):
        # No sampler.set_epoch(epoch) is needed: every epoch has another order.
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    model.eval()
    right_and_all = torch.zeros(2)
    with torch.no_grad():
        for x, y in held_out:
            # model.module: a rank may have one batch less, so nothing in this loop may wait for other ranks.
            right = model.module(x).argmax(1) == y
            right_and_all += torch.tensor([right.sum(), len(y)])
    dist.all_reduce(right_and_all)
    if dist.get_rank() == 0:
        right, count = right_and_all.tolist()
        print(f"accuracy {right / count:.4f} on {count:.0f} of {len(test)} test samples")
    del model  # else it holds the last reference to the group, and torch can deadlock when it frees both
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
