"""The digits that the demonstration trains on, and its network."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BATCH_SIZE = 24
CLASSES = 10
TRAINING = 1438
"""How many of the digits are trained on: four in five. The others are the test set."""


def load() -> tuple[TensorDataset, TensorDataset]:
    """Load the digits, split for training and test.

    Returns:
        Two sets whose samples are (index in the set, image of shape (1, 8, 8) in [0, 1], label).
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415 - only training needs the extra

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return part(images, labels, shuffled[-TRAINING:]), part(images, labels, shuffled[:-TRAINING])


def part(images: Tensor, labels: Tensor, chosen: Tensor) -> TensorDataset:
    """Return the chosen images as a set of their own."""
    return TensorDataset(torch.arange(len(chosen)), images[chosen], labels[chosen])


def network() -> nn.Module:
    """Make a small convolutional network, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )
