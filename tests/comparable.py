"""Batches as values that compare."""

from typing import Any

import torch


def flat(batch: Any) -> Any:
    """A batch as a comparable value, every bit of it."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: flat(value) for name, value in batch.items()}
    return [flat(one) for one in batch] if isinstance(batch, list | tuple) else batch
