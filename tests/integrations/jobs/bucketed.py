"""Accelerate over a loader whose order cuts the batches: what is gathered, and where the end is."""

import sys

import torch.distributed as dist
from accelerate import Accelerator

from headrace import DataLoader, LengthBucketed
from launch import report

LENGTHS = [5 + number * 37 % 41 for number in range(601)]

accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(DataLoader(range(601), order=LengthBucketed(LENGTHS, max_tokens=180), seed=3))
gathered, sizes, ends = [], [], []
for batch in loader:
    sizes.append(len(batch))
    ends.append(accelerator.gradient_state.end_of_dataloader)
    gathered += accelerator.gather_for_metrics(batch).tolist()
loader.set_epoch(0)
skipped = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 5)]
loader.set_epoch(0)
whole = [batch.tolist() for batch in loader]
report(
    sys.argv[1],
    dist.get_rank(),
    {"gathered": gathered, "sizes": sizes, "ends": ends, "skipped": skipped, "whole": whole, "len": len(loader)},
)
accelerator.end_training()
