import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

train, test = (TensorDataset(torch.rand(size, 2), torch.arange(size)) for size in (257, 65))
with tempfile.NamedTemporaryFile() as meeting:
    dist.init_process_group("gloo", init_method=f"file://{meeting.name}", rank=0, world_size=1)


def step(images, labels):
    assert len(images) == len(labels) > 0
