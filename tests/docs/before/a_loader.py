import torch

from headrace import DataLoader

loader = DataLoader(torch.arange(8.0), batch_size=2, seed=0)
next(iter(loader))
