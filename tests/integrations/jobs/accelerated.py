"""Accelerate: prepare, train with gradient accumulation, gather metrics; no set_epoch."""

import sys

import torch
from accelerate import Accelerator
from noted import Noted, Told

from headrace import DataLoader
from launch import report

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
loader = DataLoader(Told(23), batch_size=4, shuffle=True, num_workers=1)
held_out = DataLoader(Noted(23), batch_size=5, num_workers=1, executor="thread", device="cpu")
plain = DataLoader(range(23), sampler=range(23), batch_size=4)
layer = torch.nn.Linear(1, 1)
model, optimizer, prepared, evaluated, theirs = accelerator.prepare(
    layer, torch.optim.SGD(layer.parameters(), lr=0.01), loader, held_out, plain
)
epochs, synced, ends = [], [], []
for _ in range(3):
    read = []
    for batch in prepared:
        read += batch.tolist()
        with accelerator.accumulate(model):
            accelerator.backward(model(batch.float()[:, None]).sum())
            synced.append(accelerator.sync_gradients)
            ends.append(accelerator.gradient_state.end_of_dataloader)
            optimizer.step()
            optimizer.zero_grad()
    epochs.append(read)
gathered = [index for batch in evaluated for index in accelerator.gather_for_metrics(batch)["index"].tolist()]
split = [index for batch in theirs for index in batch.tolist()]
report(
    sys.argv[1],
    accelerator.process_index,
    {
        "epochs": [[sample % 100 for sample in epoch] for epoch in epochs],
        "told": [sorted({sample // 100 for sample in epoch}) for epoch in epochs],
        "ours": prepared is loader and evaluated is held_out,
        "gathered": gathered,
        "made by threads": held_out.dataset.made_by_threads(),
        "synced": synced[: len(prepared)],
        "ends": ends[: len(prepared)],
        "idle": accelerator.gradient_state.in_dataloader,
        "split": split,
        "sizes": [prepared.total_batch_size, prepared.total_dataset_length],
    },
)
accelerator.end_training()
