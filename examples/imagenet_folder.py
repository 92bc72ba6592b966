"""A folder of JPEGs for each class, as ImageNet is laid out. FOLDER/train and FOLDER/val are made if FOLDER is missing.

torchrun --nproc-per-node=2 examples/imagenet_folder.py FOLDER    or with python alone, as one process
"""

import sys
from pathlib import Path

import photographs
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from headrace import DataLoader, ImageDecoder

EPOCHS, GLOBAL_BATCH = 4, 16


class Pictures(Dataset):
    """The pictures of a folder, and the numbers of their classes."""

    def __init__(self, folder, transform):
        self.files = sorted(Path(folder).glob("*/*.jpg"))
        if not self.files:
            raise ValueError(f"no picture in {folder}: expected a folder for each class, such as {folder}/cat/1.jpg")
        self.classes = sorted({path.parent.name for path in self.files})
        self.decode, self.transform = ImageDecoder("torchrgb8"), transform  # simplejpeg if installed, else Pillow

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = self.decode(self.files[index].read_bytes())
        return self.transform(image), self.classes.index(self.files[index].parent.name)


def main(folder):
    device = photographs.start(folder)
    ranks = dist.get_world_size()
    train = Pictures(f"{folder}/train", photographs.random_resized_crop)  # its random numbers are each sample's own
    test = Pictures(f"{folder}/val", photographs.resized)
    options = {"batch_size": GLOBAL_BATCH // ranks, "num_workers": 1, "persistent_workers": True, "device": device}
    # A broken picture is an error that names it, unless it is to be replaced. In a test set nothing should be replaced.
    loader = DataLoader(train, shuffle=True, seed=0, on_error="replace", **options)
    held_out = DataLoader(test, tail="exact", **options)

    classes = len(train.classes)
    model = DistributedDataParallel(photographs.network(classes).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()

    counted = torch.zeros(len(test), 2, dtype=torch.int64, device=device)  # of each picture: times counted, times right
    with torch.no_grad():
        for images, labels in held_out:
            # model.module: a rank may have one batch less, so nothing in this loop may wait for other ranks.
            right = model.module(images).argmax(1) == labels
            numbers = torch.from_numpy(held_out.last_indices).to(device)
            counted.index_add_(0, numbers, torch.stack([torch.ones_like(right), right], 1).long())
    dist.all_reduce(counted)
    assert (counted[:, 0] == 1).all(), "every picture is counted once"
    replaced = [None] * ranks
    dist.all_gather_object(replaced, loader.stats().replacements)
    if dist.get_rank() == 0:
        count, right = counted.sum(0).tolist()
        print(f"{count} of {len(test)} pictures were counted, each once; {right / count:.2f} of them are right")
        for one in sorted(sum(replaced, ()), key=lambda one: one.epoch):
            bad, other = (train.files[index].relative_to(folder) for index in (one.index, one.substitute))
            print(f"epoch {one.epoch}: {bad} was replaced by {other}: {one.error}")
    del model  # else it holds the last reference to the group, and torch can deadlock when it frees both
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
