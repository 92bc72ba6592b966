"""Prefetchers on a CUDA stream: by hand, wrong and right, and device="cuda": python examples/prefetch_gpu.py.

Without a GPU there are no streams and no copies; what each of them reads is shown all the same.
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, mse_loss
from torch.utils.data import TensorDataset

from headrace import DataLoader

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SIDE = 256 if GPU else 32  # with a GPU a batch is 17 MB, so that its copy takes time


def wrong(loader):
    for _ in range(len(loader)):
        stream = torch.cuda.Stream() if GPU else None
        with torch.cuda.stream(stream):  # None changes nothing
            images, numbers = next(iter(loader))  # wrong: the epoch begins again, and so do the workers
            images = images.to(DEVICE, non_blocking=True)
        # Wrong: the computation's stream does not wait for the copy. And the memory belongs to the other stream, which
        # may fill it again as soon as `images` is dropped, while the computation still reads it.
        yield images, numbers


def right(loader):
    copies = torch.cuda.Stream() if GPU else None
    reader = iter(loader)  # once an epoch

    def begin():
        images, numbers = next(reader, (None, None))
        with torch.cuda.stream(copies):  # from torch's pinned memory, which is not used again before the copy has ended
            return None if images is None else images.to(DEVICE, non_blocking=True), numbers

    images, numbers = begin()
    while images is not None:
        if GPU:
            torch.cuda.current_stream().wait_stream(copies)  # the next copy is not queued yet: this waits for one
            images.record_stream(torch.cuda.current_stream())  # its memory stays until the computation has ended
        following = begin()
        yield images, numbers
        images, numbers = following


def main():
    digits = torch.tensor(load_digits().images, dtype=torch.float32)[:, None]
    enlarged = digits.repeat_interleave(SIDE // 8, 2).repeat_interleave(SIDE // 8, 3)
    dataset = TensorDataset(enlarged, torch.arange(len(digits)))  # the numbers show what was read
    options = {"batch_size": 64, "shuffle": True, "seed": 0, "num_workers": 4 if GPU else 1}
    by_hand = DataLoader(dataset, pin_memory=GPU, **options)
    ways = {"wrong": wrong(by_hand), "right": right(by_hand), "device=": DataLoader(dataset, device=DEVICE, **options)}

    ink = digits.sum((1, 2, 3)) * (SIDE // 8) ** 2  # whole numbers: all sums are exact
    layers = nn.Conv2d(1, 64, 8, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 16)
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model(torch.zeros(64, 1, SIDE, SIDE, device=DEVICE)).sum().backward()  # the first step loads libraries
    print(torch.cuda.get_device_name() if GPU else "no GPU here: no streams and no copies")
    for name, batches in ways.items():
        read, sums, started = [], [], time.perf_counter()
        for images, numbers in batches:
            sums.append(images.sum((1, 2, 3), dtype=torch.float64))  # of whatever the memory holds at this moment
            optimizer.zero_grad()
            mse_loss(model(images), adaptive_avg_pool2d(images, 4).flatten(1)).backward()
            optimizer.step()
            read.append(numbers)
        sums, numbers = torch.cat(sums).cpu(), torch.cat(read).cpu()  # this waits for the GPU
        seconds, whole = time.perf_counter() - started, (sums == ink[numbers]).sum()
        unique = len(numbers.unique())
        print(f"{name}: {len(numbers)} read, {unique} of {len(digits)} samples, {whole} whole, {seconds:.2f} s")


if __name__ == "__main__":
    main()
