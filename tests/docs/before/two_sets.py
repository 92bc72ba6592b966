import torch

train_set, test_set = torch.arange(256.0), torch.arange(512.0)
