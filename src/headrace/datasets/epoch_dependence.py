"""Whether the samples of a dataset may depend on the epoch."""

import ctypes
import multiprocessing.managers
import multiprocessing.shared_memory
import multiprocessing.sharedctypes
from typing import Any

import torch

from headrace.datasets.fork_safety import parts

_SHARED = (
    multiprocessing.managers.BaseProxy,
    multiprocessing.shared_memory.SharedMemory,
    multiprocessing.sharedctypes.SynchronizedBase,
    ctypes.Array,
    ctypes.Structure,
    ctypes._SimpleCData,
)


def may_depend_on_epoch(used: Any) -> bool:
    """Tell whether a dataset's samples may depend on the epoch, while workers read their copies of it.

    They may if the dataset, or a part of it, has a method `set_epoch`, or holds memory that it shares with the rank.
    The parts are searched a few levels deep. What functions refer to is not searched.

    Args:
        used: The dataset, and what else workers use.
    """
    return any(_may_change(part) for _, part in parts(used))


def _may_change(part: Any) -> bool:
    kind = type(part)
    if issubclass(kind, torch.Tensor):
        return kind is torch.Tensor and part.device.type == "cpu" and part.is_shared()
    return issubclass(kind, _SHARED) or callable(getattr(kind, "set_epoch", None))
