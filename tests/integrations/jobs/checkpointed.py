"""torch.distributed.checkpoint: the loader saved as a `Stateful` beside a tensor mid-epoch, and loaded in any world."""

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from headrace import DataLoader
from headrace.testing import FakeDataset
from launch import report

folder, phase = sys.argv[1], sys.argv[2]
dist.init_process_group("gloo")
loader = DataLoader(FakeDataset(101), batch_size=8 if phase == "save" else 3, shuffle=True, tail="exact")
weights = torch.zeros(3)
parts: dict[str, Any] = {"loader": loader, "weights": weights}
rows: list[Any] = []


def keep(batch: Any) -> None:
    rows.extend(zip(*(part.tolist() for part in batch.values()), strict=True))


if phase == "save":
    loader.set_epoch(2)
    reader = iter(loader)
    for _ in range(3):
        keep(next(reader))
    weights += 1
    dcp.save(parts, checkpoint_id=f"{folder}/checkpoint")
else:
    dcp.load(parts, checkpoint_id=f"{folder}/checkpoint")
    for batch in loader:
        keep(batch)
report(folder, dist.get_rank(), {"rows": rows, "state": loader.state_dict(), "weights": weights.tolist()})
dist.barrier()
