import tempfile

import torch
import torch.distributed as dist

with tempfile.NamedTemporaryFile() as meeting:
    dist.init_process_group("gloo", init_method=f"file://{meeting.name}", rank=0, world_size=1)
