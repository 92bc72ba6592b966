"""A dataset that notes what made its samples, to show that a framework has left the loader's executor alone."""

from collections.abc import Iterable
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from headrace import rng


class Noted(Dataset[dict[str, Any]]):
    """Samples `{"index": int, "noise": float}`, the noise being each sample's own.

    Args:
        length: The number of samples.

    Attributes:
        makers: Who made samples in this process: "worker", or "caller" where `get_worker_info()` is None.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.makers: set[str] = set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.makers.add("worker" if get_worker_info() else "caller")
        return {"index": index, "noise": rng().random()}

    def made_by_threads(self) -> bool:
        """Tell whether `executor="thread"` made all samples: torch's workers would be in other processes."""
        return self.makers == {"worker"}


class Told(Dataset[int]):
    """Samples that are 100 times the epoch that was told, plus the index."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 77

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


def rows(batches: Iterable[Any]) -> list[Any]:
    """Return the samples of batches, each as [index, noise]."""
    return [[*row] for batch in batches for row in zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True)]
