"""Reads an epoch of a bucketed order, and lets the ranks disagree about its budget."""

import sys

import torch.distributed as dist

from headrace import DataLoader, LengthBucketed, StateMismatch
from launch import report

LENGTHS = [1 + number * 37 % 41 for number in range(300)]


def refused(**options: int) -> str:
    loader = DataLoader(range(300), order=LengthBucketed(LENGTHS, **options))
    try:
        loader.verify()
    except StateMismatch as error:
        return str(error)
    return ""


dist.init_process_group("gloo")
rank = dist.get_rank()
loader = DataLoader(range(300), order=LengthBucketed(LENGTHS, max_tokens=200), num_workers=1)
loader.verify()
batches = [batch.tolist() for batch in loader]
report(
    sys.argv[1],
    rank,
    {
        "len": len(DataLoader(range(300), order=LengthBucketed(LENGTHS, max_tokens=200))),
        "steps": len(batches),
        "indices": [index for batch in batches for index in batch],
        "refused": refused(max_tokens=200 + rank),
        "refused_per_rank": refused(max_tokens=200, per_rank=1 + rank),
    },
)
dist.destroy_process_group()
