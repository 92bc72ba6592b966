"""Can be killed at any moment and goes on exactly: torchrun --nproc-per-node=2 examples/ddp_resume.py FILE."""

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from headrace import DataLoader

EPOCHS, SAVE_EVERY = 4, 7


class NoisyDigits(Dataset):
    """Digits that are shifted and blurred at random: the resumed run must draw the same numbers, too."""

    def __init__(self):
        digits = load_digits()
        self.images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
        self.labels = torch.tensor(digits.target)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        shift = int(torch.randint(-1, 2, ()))
        return self.images[index].roll(shift, -1) + 0.1 * torch.randn(1, 8, 8), self.labels[index]


def main(path):
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same first weights on every rank
    loader = DataLoader(NoisyDigits(), batch_size=32, shuffle=True, num_workers=1)
    layers = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    parts = {"model": model.module, "optimizer": optimizer, "loader": loader}

    if os.path.exists(path):
        for name, state in torch.load(path, weights_only=True).items():
            parts[name].load_state_dict(state)
        if dist.get_rank() == 0:
            print("going on at", {name: loader.state_dict()[name] for name in ("epoch", "samples")}, flush=True)

    steps = 0
    while loader.epoch < EPOCHS:
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
            if steps % SAVE_EVERY == 0 and dist.get_rank() == 0:  # the loader's state is the same on every rank
                torch.save({name: part.state_dict() for name, part in parts.items()}, f"{path}.new")
                os.replace(f"{path}.new", path)  # the file is replaced completely or not at all

    if dist.get_rank() == 0:
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        print(f"after {steps} steps of this run the weights are {hashlib.sha256(weights).hexdigest()}")
    del model  # else it holds the last reference to the group, and torch can deadlock when it frees both
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
