"""From one device to DistributedDataParallel: only the lines with "# DDP" at their end are added.

torchrun --nproc-per-node=2 examples/mnist_ddp.py     # also python -m torch.distributed.launch; or python alone
python examples/mnist_ddp.py --table                  # one rank against two, each run by torchrun
"""

import argparse
import logging
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset, random_split

from headrace import DataLoader


def main(epochs):
    rank, ranks, device = 0, 1, "cuda" if torch.cuda.is_available() else "cpu"
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # DDP
    if device == "cuda":  # DDP
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # DDP
    dist.init_process_group(**alone)  # DDP
    rank, ranks = dist.get_rank(), dist.get_world_size()  # DDP
    logging.basicConfig(format=f"rank {rank}: %(message)s", level=logging.INFO, stream=sys.stdout)
    torch.manual_seed(0)  # the same split and the same first weights on every rank

    digits = load_digits()
    images = interpolate(torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], size=28, mode="bilinear")
    train, test = random_split(TensorDataset(images, torch.tensor(digits.target)), [1408, 389])
    # Each rank reads its share, and each epoch has another order: no DistributedSampler and no set_epoch are added.
    loader = DataLoader(train, batch_size=32, shuffle=True, seed=0, device=device)
    held_out = DataLoader(test, batch_size=32, tail="exact", device=device)  # each test sample once
    layers = nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(784, 10)
    model = network = nn.Sequential(*layers).to(device)
    model = DistributedDataParallel(network)  # DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    started = time.perf_counter()
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        logging.info("epoch %d of %d batches, the last loss %.4f", epoch, len(loader), loss.item())
    speed = epochs * len(train) / (time.perf_counter() - started)

    with torch.no_grad():  # the network itself: a rank may have one batch less, so none may wait for the others here
        right = sum((network(x).argmax(1) == y).sum() for x, y in held_out)
    dist.all_reduce(right)  # DDP
    if rank == 0:
        torch.save(network.state_dict(), "mnist.pt")
        logging.info("saved mnist.pt")
        print(f"| {ranks} | {len(loader)} | {speed:,.0f} | {right / len(test):.4f} |")
    del model  # else it holds the last reference to the group, and torch can deadlock when it frees both  # DDP
    dist.destroy_process_group()  # DDP


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=5, type=int)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--local-rank", help="torch.distributed.launch adds it; LOCAL_RANK has it, too")
    given = parser.parse_args()
    if given.table:
        print("| ranks | len(loader) | samples/s | accuracy |\n| --- | --- | --- | --- |")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread for each rank
        for ranks in 1, 2:
            torchrun = "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"
            command = [sys.executable, "-m", *torchrun, __file__, f"--epochs={given.epochs}"]
            print(subprocess.check_output(command, text=True).splitlines()[-1])
    else:
        main(given.epochs)
