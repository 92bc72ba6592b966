"""Texts of varying length in batches under a budget: torchrun --nproc-per-node=2 examples/variable_length.py."""

import ast
import os
import time
from itertools import chain, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from headrace import DataLoader, LengthBucketed

BUDGET = 8192  # bytes in a rank's batch, padding included
KINDS = ast.Module, ast.ClassDef, ast.FunctionDef


def docstrings():  # of Python's own modules, with the kind of what each describes
    files = sorted(Path(os.__file__).parent.glob("[p-z]*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, KINDS)]
    found = [(list((ast.get_docstring(node) or "").encode()[:2048]), KINDS.index(type(node))) for node in nodes]
    return [(torch.tensor(text), kind, number) for number, (text, kind) in enumerate(found) if text]


def pad(samples):
    texts, kinds, numbers = zip(*samples, strict=True)
    return pad_sequence(texts, batch_first=True), torch.tensor(kinds), numbers


def train(loader):
    torch.manual_seed(0)
    layers = nn.Embedding(256, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer, steps = torch.optim.AdamW(model.parameters()), []
    for texts, kinds, numbers in loader:
        started = time.perf_counter()
        optimizer.zero_grad()
        scores = (model(texts) * (texts > 0)[..., None]).sum(1)  # zeros are padding
        nn.functional.cross_entropy(scores, kinds).backward()
        optimizer.step()
        steps.append((numbers, texts.numel(), int((texts > 0).sum()), texts.shape[1], time.perf_counter() - started))
    return steps


def main():
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    texts, ranks = docstrings(), [None] * dist.get_world_size()
    order = LengthBucketed([len(text) for text, *_ in texts], max_tokens=BUDGET)
    options = {"collate_fn": pad, "seed": 0, "num_workers": 1}
    bucketed, resumed = (DataLoader(texts, order=order, **options) for _ in range(2))
    random = DataLoader(texts, -(-len(texts) // (len(bucketed) * len(ranks))), shuffle=True, **options)
    tell = print if dist.get_rank() == 0 else lambda _: None
    tell(f"{len(texts)} texts  steps  padding  largest batch  longest texts of ranks differ by  a step takes")
    for name, loader in ("random", random), ("bucketed", bucketed):
        dist.all_gather_object(ranks, train(loader))
        steps = list(zip(*ranks, strict=True))  # strict: all ranks took equally many
        numbers, padded, filled, _, seconds = zip(*chain(*steps), strict=True)
        apart = max(max(batch[3] for batch in step) / min(batch[3] for batch in step) for step in steps) - 1
        time_s = torch.tensor(seconds[len(ranks) :])  # without the first step
        row = f"{name:10} {len(steps):7} {1 - sum(filled) / sum(padded):8.1%} {max(padded):14,} {apart:33.0%}"
        tell(f"{row}   {time_s.mean() * 1e3:.0f} ms ± {time_s.std() / time_s.mean():.0%}")
    twice = sum(map(len, numbers)) - len(texts)  # where ranks would else have unequal steps
    tell(f"every text is read: {len({*chain(*numbers)}) == len(texts)}, {twice} of them twice")
    later = iter(bucketed)  # the next epoch
    before = [batch[2] for batch in islice(later, 5)]
    resumed.load_state_dict(bucketed.state_dict())
    after, again = ([batch[2] for batch in batches] for batches in (later, resumed))
    dist.all_gather_object(ranks, (before + after, after == again))
    later, same = zip(*ranks, strict=True)
    known = {frozenset(batch) for batch in numbers} & {frozenset(batch) for batch in chain(*later)}
    tell(f"of {len(numbers)} batches of one epoch {len(known)} come again in the next")
    tell(f"an epoch resumed after 5 steps goes on with the same batches: {all(same)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
