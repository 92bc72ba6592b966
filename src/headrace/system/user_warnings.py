"""Warnings that name the line of the user's code, however far above it is in the stack."""

import os
import sys
import warnings
from pathlib import Path

import torch.utils.data

_PASSED = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.utils.data.__file__).parent))
"""Code in these folders is not the user's."""


def warn_user(text: str) -> None:
    """Give a `UserWarning` at the nearest line outside of this package and of torch's loader."""
    level, frame = 1, sys._getframe()
    while frame.f_code.co_filename.startswith(_PASSED) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
