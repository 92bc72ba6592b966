"""The device that a user chose."""

import os

import torch

from headrace.errors import bad_type, bad_value


def checked_device(device: object) -> torch.device:
    """Return the device that an argument `device` means. It is not used yet.

    Raises:
        TypeError: It is neither text nor a device.
        ValueError: There is no such device here.
    """
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if there is not None else 0
    allowed = '"cpu"' if there is None else f'"cpu", "{there.type}", or "{there.type}:0" to "{there.type}:{count - 1}"'
    fix = "torch finds no accelerator here." if there is None else "Leave out the index for the current device."
    if not isinstance(device, str | torch.device):
        bad_type("device", device, allowed, fix)
    try:
        found = torch.device(device)
    except RuntimeError:
        bad_value("device", device, allowed, fix)
    if found.type == "cpu":
        return found
    if there is None or found.type != there.type or (found.index or 0) >= count:
        bad_value("device", device, allowed, fix)
    return found


def other_local_rank(device: torch.device) -> str:
    """Return a warning where `LOCAL_RANK` says that another device is this rank's; "" if it does not.

    Args:
        device: With its index.
    """
    local = os.environ.get("LOCAL_RANK", "")
    if device.type == "cpu" or not local.isdigit() or int(local) == device.index:
        return ""
    if int(local) >= torch.accelerator.device_count():
        return ""
    return (
        f"LOCAL_RANK={local} and the current device is {device}: several ranks may use the same one. Call "
        f"torch.accelerator.set_device_index({local}) before the loader is iterated, or pass device="
        f'"{device.type}:{local}".'
    )
