"""Lightning Fabric: its own sampler injection left on, no set_epoch."""

import sys

import torch
from lightning.fabric import Fabric

from headrace import DataLoader
from launch import report

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model, optimizer = fabric.setup((layer := torch.nn.Linear(1, 1)), torch.optim.SGD(layer.parameters(), lr=0.1))
loader = DataLoader(range(23), batch_size=4, shuffle=True, num_workers=1)
wrapped = fabric.setup_dataloaders(loader)
epochs = []
for _ in range(3):
    read = []
    for batch in wrapped:
        read += batch.tolist()
        optimizer.zero_grad()
        fabric.backward(model(batch.float()[:, None]).sum())
        optimizer.step()
    epochs.append(read)
report(sys.argv[1], fabric.global_rank, {"epochs": epochs, "ours": wrapped._dataloader is loader})
