"""DataParallel splits each batch over the GPUs of one process: python examples/ray_data_parallel.py --executor ray."""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executor", default="inline", choices=["inline", "process", "ray"])
    parser.add_argument("--epochs", default=12, type=int)
    given = parser.parse_args()

    torch.manual_seed(0)  # the first weights; the loader has a seed of its own
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    train, test = torch.randperm(len(labels)).split([1408, 389])

    # Only `executor` changes: inline, in local processes, or on Ray, the batches are the same bits.
    shaken = Shaken(images[train], labels[train])
    options = {"seed": 0, "num_workers": 2, "persistent_workers": True, "executor": given.executor}
    loader = DataLoader(shaken, batch_size=64, shuffle=True, pin_memory=torch.cuda.is_available(), **options)

    # One process reads whole batches, and DataParallel splits each over the devices: for the loader this is one rank.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = torch.cuda.device_count()
    print(f"{count} GPUs share each batch" if count else "no GPU here: DataParallel hands whole batches to the module")
    layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)
    model = nn.DataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    started = time.perf_counter()
    for _ in range(given.epochs):
        total = 0.0
        for batch in loader:
            x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
    seconds = time.perf_counter() - started

    model.eval()
    with torch.no_grad():
        right = (model(images[test].to(device)).argmax(1).cpu() == labels[test]).sum().item()
    print(f"accuracy {right / len(test)!r}, loss {total / len(shaken)!r}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
