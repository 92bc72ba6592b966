"""Names for parts of the work, in the traces of torch's profiler."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Tells whether torch's profiler is on."""


_NONE = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """Return a block that has a name in a trace, if torch's profiler is on."""
    return torch.autograd.profiler.record_function(name) if profiled() else _NONE
