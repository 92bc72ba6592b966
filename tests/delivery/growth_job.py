"""Reads epochs with workers that become more by themselves, in step with the other ranks, until all ranks have more."""

import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from headrace import DataLoader
from launch import report
from waiting import LIMIT_S

LENGTH, BATCH_SIZE = 400, 2


class Slow(Dataset[int]):
    """Samples that take real time: the pool grows because of the time that ranks wait for them."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        time.sleep(0.003)
        return index


dist.init_process_group("gloo")
loader = DataLoader(
    Slow(), BATCH_SIZE, shuffle=True, seed=5, num_workers=1, max_workers=3, multiprocessing_context="fork", timeout=60
)
epochs, fewest, deadline_s = [], torch.ones(1, dtype=torch.int64), time.monotonic() + 2 * LIMIT_S
while fewest < 2 and time.monotonic() < deadline_s:
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        fewest[:] = loader.stats().workers
        dist.all_reduce(fewest, dist.ReduceOp.MIN)
    epochs.append(batches)
plan = loader.plan()
assert plan is not None
expected = [[plan.batch(epoch, step).tolist() for step in range(len(loader))] for epoch in range(len(epochs))]
report(sys.argv[1], dist.get_rank(), {"fewest": int(fewest), "same": epochs == expected, "epochs": len(epochs)})
dist.destroy_process_group()
