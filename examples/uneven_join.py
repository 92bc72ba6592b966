"""Ranks with unequal numbers of steps, without a hang; ranks that come late, disagree or skip. On CPUs, with gloo.

torchrun --nproc-per-node=2 examples/uneven_join.py    or with python alone
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset, TensorDataset

from headrace import DataLoader, StateMismatch

SAMPLES, OPTIONS = 321, {"batch_size": 32, "shuffle": True, "seed": 0}


def gathered(values):
    found = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return torch.stack(found)


def main():
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank, signal, say = dist.get_rank(), dist.new_group(), print if dist.get_rank() == 0 else lambda *_: None
    images, labels = (torch.tensor(part[:SAMPLES]) for part in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 8 - 1, labels)
    exact = DataLoader(data, tail="exact", **OPTIONS)  # on two ranks 161 and 160 samples, 6 and 5 steps
    torch.manual_seed(0)
    model, steps = DistributedDataParallel(nn.Linear(64, 10)), torch.tensor(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    with Join([model]):  # without it the rank with a step more waits in backward() until the group's timeout
        for x, y in exact:  # ranks that have ended answer for the model: no other collective may be in this loop
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
    # All have the weights of a rank that made all steps, but not its optimizer's state: momentum would now differ.
    weights = gathered(model.module.weight.detach())
    say("Join: steps", gathered(steps).tolist(), "equal weights:", (weights == weights[0]).all().item())
    counts = torch.zeros(2, dtype=torch.float64)  # right, all
    for x, y in exact:
        counts += torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)])
    mean = counts[0] / counts[1]  # of unequal shares: the average over ranks is not the average over samples
    if rank > 0:
        dist.barrier(signal)  # these ranks do something else first
    work = dist.all_reduce(counts, async_op=True)  # SUM; this rank can go on meanwhile
    try:
        work.wait(timedelta(seconds=60 if rank else 0.5))  # a limit of this wait: the sum goes on
    except RuntimeError as error:
        say("a rank is late:", error)
        dist.barrier(signal)
    work.wait()  # until the sum is there; with NCCL, until the current stream waits for it
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    right = (model.module(data.tensors[0]).argmax(1) == labels).sum().item()
    say(f"right: {right} in one process; {counts[0]:.0f} of {counts[1]:.0f} by SUM; {mean * SAMPLES:.4f} by AVG")
    try:
        DataLoader(Subset(data, range(SAMPLES - 5 * rank)), **OPTIONS).verify()  # as if a node had fewer files
    except StateMismatch as error:  # on every rank
        say("verify:", error)
    loader, kept = DataLoader(data, **OPTIONS), torch.zeros(2)  # equal steps, as a collective in each of them needs
    for step, _ in enumerate(loader):
        bad = torch.tensor(float(rank == 1 and step == 2))  # say, its loss is not finite
        kept[0] += 1 - bad  # it skips alone: DDP would average its next gradients with the others' of this step
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        kept[1] += 1 - bad  # all skip
    loader.verify()  # agrees: it knows what ranks are to read, not what they do with it. Ranks must compare that:
    say("steps of {}, skipped alone: {}, together: {}".format(len(loader), *gathered(kept).T.int().tolist()))
    del model  # else it holds the last reference to the group, and torch can deadlock when it frees both
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
