"""Page-locked memory for the current accelerator, by torch's rules and with torch's warnings."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from headrace.system.user_warnings import warn_user


def pin_function(wanted: bool, device: str) -> Callable[[Any], Any] | None:
    """Return the function that pins a batch; None where `pin_memory` is off or no accelerator can use it.

    Args:
        wanted: The loader's `pin_memory`.
        device: The loader's `pin_memory_device`, which torch has deprecated and ignores.
    """
    if not wanted:
        return None
    if device:
        warn_user(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{device}'.",
        )
    if not torch.accelerator.is_available():
        warn_user(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
        )
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == "mps":
        warn_user(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used.",
        )
        return None
    return cast("Callable[[Any], Any]", pin_memory)
