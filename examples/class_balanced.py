"""Equally many samples of each class in every batch: torchrun --nproc-per-node=2 examples/class_balanced.py."""

import hashlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from headrace import Balanced, DataLoader


def rare_digits():  # 170 zeros, 85 ones, 56 twos, ... 17 nines
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    kept = torch.cat([(labels == label).nonzero()[: 170 // (label + 1), 0] for label in range(10)])
    return images[kept], labels[kept]


def of_all_ranks(tensors):  # a tensor for each step, shape (n,), becomes one of shape (ranks, steps, n)
    mine = torch.stack(tensors)
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, mine)
    return torch.stack(everywhere)


def show(name, global_batch, **options):
    dataset = TensorDataset(*rare_digits())
    size = global_batch // dist.get_world_size()
    # Under a group each rank reads its share. drop_last: the last, smaller batch would have fewer of each class.
    loader = DataLoader(dataset, batch_size=size, drop_last=True, seed=0, **options)
    read = [(torch.bincount(labels, minlength=10), torch.from_numpy(loader.last_indices)) for _, labels in loader]
    counts, indices = map(of_all_ranks, zip(*read, strict=True))
    if dist.get_rank() == 0:
        print(f"{name}, batches of {size} on each of {len(counts)} ranks")
        for step in range(2):
            for rank in range(len(counts)):
                print(f"  step {step}, rank {rank}: {counts[rank, step].tolist()}")
        print(f"  a batch has {counts.min()} to {counts.max()} of a class, the epoch {counts.sum((0, 1)).tolist()}")
        steps = indices.transpose(0, 1).flatten(1).sort().values  # what all ranks read at a step, shape (steps, n)
        print(f"  samples of the steps: {hashlib.sha256(steps.numpy().tobytes()).hexdigest()[:8]}", flush=True)


def main():
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    _, labels = rare_digits()
    show("shuffle=True", 40, shuffle=True)
    show("order=Balanced(labels)", 40, order=Balanced(labels))
    show("order=Balanced(labels)", 28, order=Balanced(labels))  # no multiple of ten: counts differ by at most one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
