"""What a dataset can learn from the rank while workers read their copies of it."""

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


def learns_of_epochs(used: Any) -> bool:
    """Tell whether a dataset can be told of an epoch, and may then give other samples.

    It can if it, or a part of it, has a method `set_epoch`, or holds memory that it shares with the rank. The parts are
    searched a few levels deep; what functions refer to is not.

    Args:
        used: The dataset, and what else workers use.
    """
    return any(_learns(part) for _, part in parts(used))


def _learns(part: Any) -> bool:
    kind = type(part)
    if issubclass(kind, torch.Tensor):
        return kind is torch.Tensor and part.device.type == "cpu" and part.is_shared()
    return issubclass(kind, _SHARED) or callable(getattr(kind, "set_epoch", None))
