import torch

from headrace import DataLoader

kept = torch.arange(24.0).reshape(12, 2)
loader = DataLoader(kept, batch_size=2, num_workers=1, pin_memory=True)
steps, trained = 3, []


def train(images):
    assert images.is_cuda
    trained.append(images.cpu())
