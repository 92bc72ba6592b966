"""Trains on 32x32 images and can be killed at any moment: torchrun --nproc-per-node=2 examples/cifar_ddp.py FILE."""

import os
import sys

import skimage
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, interpolate, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from headrace import DataLoader

SEED, EPOCHS, SAVE_EVERY = 0, 4, 8  # 22 steps an epoch on two ranks: states are of the middle of one
NAMES = "astronaut", "chelsea", "coffee", "hubble_deep_field", "immunohistochemistry", "retina", "rocket"


def squares():  # 256 of each photograph, shape (n, 3, 32, 32), and the number of the photograph that each is from
    photographs = (torch.from_numpy(getattr(skimage.data, name)()) for name in NAMES)
    whole = torch.cat([interpolate(photograph.permute(2, 0, 1)[None], (512, 512)) for photograph in photographs]) / 255
    cut = whole.unfold(2, 32, 32).unfold(3, 32, 32).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 32, 32)
    return cut, torch.arange(len(NAMES)).repeat_interleave(256)


class Augmented(TensorDataset):
    """Images, shifted by up to 4 pixels and mirrored at random. The random numbers are each sample's own."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
        return image.flip(2) if torch.rand(()) < 0.5 else image, label


def main(path):
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it a GPU does not always add in the same order
    torch.use_deterministic_algorithms(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(**alone)
    torch.manual_seed(SEED)  # the same split and the same first weights on every rank
    images, labels = squares()
    train, test = torch.randperm(len(labels)).split([1408, 384])
    std, mean = torch.std_mean(images[train], (0, 2, 3), keepdim=True)
    images = (images - mean) / std
    options = {"batch_size": 32, "seed": SEED, "device": device}
    loader = DataLoader(Augmented(images[train], labels[train]), shuffle=True, num_workers=1, **options)
    held_out = DataLoader(TensorDataset(images[test], labels[test]), tail="exact", **options)  # each image once
    layers = nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1152, len(NAMES))).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    parts, steps = {"model": network, "optimizer": optimizer, "loader": loader}, 0
    for name, state in torch.load(path, "cpu", weights_only=True).items() if os.path.exists(path) else ():
        parts[name].load_state_dict(state)
    print(f"begins at sample {loader.state_dict()['samples']} of epoch {loader.epoch}", flush=True)
    while loader.epoch < EPOCHS:
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
            if steps % SAVE_EVERY == 0 and dist.get_rank() == 0:  # the loader's state is the same on every rank
                torch.save({name: part.state_dict() for name, part in parts.items()}, f"{path}.new")
                os.replace(f"{path}.new", path)  # the file is replaced completely or not at all
    with torch.no_grad():  # the network itself: a rank may have one batch less, so none may wait for the others here
        right = sum((network(x).argmax(1) == y).sum() for x, y in held_out)
    dist.all_reduce(right)
    if dist.get_rank() == 0:
        print(f"after {steps} steps of this run: {right} of {len(test)} right")
    del model  # else it holds the last reference to the group, and torch can deadlock when it frees both
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
