import torch
from torch.utils.data import Dataset, TensorDataset

import headrace
from headrace import DataLoader

dataset = TensorDataset(torch.arange(256.0).reshape(128, 2), torch.arange(128) % 2)
