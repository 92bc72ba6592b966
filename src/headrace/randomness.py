"""The three global generators of a process: seeding them cheaply, and keeping a caller's apart."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.random  # numpy loads it late, which every forked worker would do again
import torch
from torch.utils.data._utils.worker import _generate_state


def seed_from_words(words: Sequence[int]) -> None:
    """Seed torch, random and numpy from three words: 64, 64 and 32 bits.

    `torch.manual_seed` also visits every accelerator, at eighty times the cost; work is done on the CPU.
    """
    torch_seed, python_seed, numpy_seed = words
    torch.default_generator.manual_seed(torch_seed)
    random.seed(python_seed)
    np.random.seed(numpy_seed)


def seed_worker(base_seed: int, worker_id: int) -> int:
    """Seed the three generators as torch seeds its worker `worker_id`, and return the worker's seed."""
    seed = base_seed + worker_id
    random.seed(seed)
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)  # also what an accelerator would draw in this worker; it costs a millisecond
    np.random.seed(_generate_state(base_seed, worker_id))  # type: ignore[no-untyped-call]
    return seed


class Generators:
    """The states of the three global generators, taken when made."""

    def __init__(self) -> None:
        self._states: tuple[Any, ...] = (torch.get_rng_state(), random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Put the states back."""
        torch_state, python_state, numpy_state = self._states
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def callers_generators_kept() -> Iterator[None]:
    """Leave the caller's generators as they were, whatever the work inside draws or seeds."""
    callers = Generators()
    try:
        yield
    finally:
        callers.restore()
