"""What one seed fixes, and what it cannot: python examples/reproducible.py, or with torchrun --nproc-per-node=2."""

import hashlib
import random
import subprocess
import sys
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from headrace import DataLoader


class Augmented(TensorDataset):
    """Digits, shifted, mirrored and blurred at random by three generators; and their numbers."""

    def __getitem__(self, index):
        image, number = super().__getitem__(index)
        image = image.roll(int(torch.randint(-1, 2, ())), -1).flip([-1] if random.random() < 0.5 else [])
        generator = np.random if self.seeded else np.random.default_rng()
        return image + torch.from_numpy(generator.normal(0, 0.1, (8, 8))), number


def good(seeded=True, **options):
    dataset = Augmented(torch.tensor(load_digits().images[:512] / 16), torch.arange(512))
    dataset.seeded = seeded  # if not, the system gives its third generator another seed for each sample
    batch_size = 64 // (dist.get_world_size() if dist.is_initialized() else 1)
    return DataLoader(dataset, batch_size, shuffle=True, seed=7, **options)


def bad():
    return good(seeded=False)


def train(executor, workers, stop=None):
    torch.manual_seed(7)  # the first weights
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(64, 64)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, read = good(executor=executor, num_workers=workers), []
    while loader.epoch < 2:
        for images, numbers in islice(loader, stop):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(images), images.flatten(1)).backward()
            optimizer.step()
            read.append((numbers, images))
        if stop:  # what is left comes from another loader, in this process
            state, stop, loader = loader.state_dict(), None, good()
            loader.load_state_dict(state)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    results = *map(of_all_ranks, zip(*read, strict=True)), weights, weights.round(decimals=6) + 0  # no -0.0
    return [hashlib.sha256(result.numpy().tobytes()).hexdigest()[:8] for result in results]


def of_all_ranks(parts):  # rank r of W has the samples at the positions r, r + W, ... of each global batch
    everywhere = [torch.empty_like(torch.cat(parts)) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, torch.cat(parts))
    return torch.stack(everywhere, 1)


def main():
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    for way in ("inline", 0), ("process", 1), ("process", 2), ("thread", 2), ("process", 2, 5):
        order, samples, weights, rounded = train(*way)
        if dist.get_rank() == 0:
            print(f"{way}: order {order}, samples {samples}, weights {weights}, to 6 digits {rounded}", flush=True)
    for loader in ("good", "bad") if dist.get_world_size() == 1 else ():
        command = "-m", "headrace", "verify", f"{__file__}:{loader}", "--samples=64", "--executors=inline"
        subprocess.run([sys.executable, *command], check=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
