"""What torch refuses, reports and warns of, headrace does by the same type and in the same words.

What it refuses earlier than torch, and in more words, is in `test_arguments.py`.
"""

import re
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import parity_datasets as data
from parity_tools import (
    LOADERS,
    Raised,
    assert_parity,
    attempt,
    observe,
    one_epoch,
    same,
    seed_everything,
    steps,
    two_epochs,
)

pytestmark = pytest.mark.timeout(180)


class Unsized:
    """Sample i is i, for every i."""

    def __getitem__(self, index: int) -> int:
        return index


MAP, STREAM = data.Drawing(), data.Stream()
WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "negative workers": (MAP, {"num_workers": -1}),
    "negative timeout": (MAP, {"timeout": -1}),
    "negative prefetch": (MAP, {"num_workers": 1, "prefetch_factor": -1}),
    "prefetch without workers": (MAP, {"prefetch_factor": 2}),
    "zero prefetch without workers": (MAP, {"prefetch_factor": 0}),
    "persistent without workers": (MAP, {"persistent_workers": True}),
    "context without workers": (MAP, {"multiprocessing_context": "fork"}),
    "unknown context": (MAP, {"num_workers": 1, "multiprocessing_context": "thread"}),
    "no context": (MAP, {"num_workers": 1, "multiprocessing_context": 7}),
    "shuffled stream": (STREAM, {"shuffle": True}),
    "stream, shuffle=0": (STREAM, {"shuffle": 0}),
    "stream, shuffle=[]": (STREAM, {"shuffle": []}),
    "stream with a sampler": (STREAM, {"sampler": [1]}),
    "stream with a batch sampler": (STREAM, {"batch_sampler": [[1]]}),
    "shuffled stream with a sampler": (STREAM, {"shuffle": True, "sampler": [1], "batch_size": None}),
    "stream unbatched, dropping": (STREAM, {"batch_size": None, "drop_last": True}),
    "sampler and shuffle": (MAP, {"sampler": [1], "shuffle": True}),
    "two samplers": (MAP, {"sampler": [1], "batch_sampler": [[1]]}),
    "batch sampler and size": (MAP, {"batch_sampler": [[1]], "batch_size": 2}),
    "batch sampler and no size": (MAP, {"batch_sampler": [[1]], "batch_size": None}),
    "batch sampler and shuffle": (MAP, {"batch_sampler": [[1]], "shuffle": True}),
    "batch sampler, dropping": (MAP, {"batch_sampler": [[1]], "drop_last": True}),
    "unbatched, dropping": (MAP, {"batch_size": None, "drop_last": True}),
    "size 0": (MAP, {"batch_size": 0}),
    "negative size": (MAP, {"batch_size": -2}),
    "size True": (MAP, {"batch_size": True}),
    "size 2.0": (MAP, {"batch_size": 2.0}),
    "size of numpy": (MAP, {"batch_size": np.int64(2)}),
    "drop_last of numpy": (MAP, {"batch_size": 2, "drop_last": np.bool_(True)}),
    "drop_last=1": (MAP, {"batch_size": 2, "drop_last": 1}),
    "wrong generator": (MAP, {"shuffle": True, "generator": 7}),
    "wrong generator, unshuffled": (MAP, {"generator": 7}),
    "empty": ([], {}),
    "empty, shuffled": ([], {"shuffle": True}),
    "no length": (Unsized(), {}),
    "no length, shuffled": (Unsized(), {"shuffle": True}),
    "no length, worker": (Unsized(), {"num_workers": 1}),
    "unknown option": (MAP, {"batchsize": 1}),
    "too many positions": (MAP, {"args": (1, False, None, None, 0, None, False, False, 0, None, None, None, 2)}),
    "inline timeout": (MAP, {"timeout": 3}),
    "zero prefetch": (MAP, {"num_workers": 1, "prefetch_factor": 0}),
    "sampler that is none": (MAP, {"sampler": 7}),
    "batch sampler of integers": (MAP, {"batch_sampler": [1, 2]}),
    "batch sampler of integers, worker": (MAP, {"batch_sampler": [1, 2], "num_workers": 1}),
    "index out of range": ([1, 2], {"sampler": [0, 2, 1]}),
    "index out of range, worker": ([1, 2], {"sampler": [0, 2, 1], "num_workers": 1}),
    "nothing to collate": (MAP, {"batch_sampler": [[], [1]]}),
    "nothing to collate, worker": (MAP, {"batch_sampler": [[], [1]], "num_workers": 1}),
    "None": ([None, None], {"batch_size": 2}),
    "None, worker": ([None, None], {"batch_size": 2, "num_workers": 1}),
    "None among tensors": ([torch.zeros(2), None], {"batch_size": 2}),
    "None among tensors, worker": ([torch.zeros(2), None], {"batch_size": 2, "num_workers": 1}),
    "None in a sample, worker": ([(torch.zeros(2), 1), (None, 1)], {"batch_size": 2, "num_workers": 1}),
    "a number among tensors, worker": ([torch.zeros(2), 1.0], {"batch_size": 2, "num_workers": 1}),
    "unknown sample type": ([object()], {}),
    "unknown sample type, worker": ([object()], {"num_workers": 1}),
    "uneven samples": ([[1, 2], [1]], {"batch_size": 2}),
    "uneven tensors, worker": ([torch.zeros(2), torch.zeros(3)], {"batch_size": 2, "num_workers": 1}),
    "gradients, worker": ([torch.zeros(2, requires_grad=True)], {"num_workers": 1}),
    "stream of nothing": (STREAM, {"batch_size": 0}),
}


# torch's half-made iterator stumbles over itself when it is collected
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(case):
    """The same call is refused at the same place: when made, by `len`, by `iter`, or at a certain batch."""
    dataset, options = WRONG[case]
    args, options = options.get("args", ()), {key: value for key, value in options.items() if key != "args"}
    seen = []
    for loader_class in LOADERS:
        seed_everything()
        loader = attempt(lambda loader_class=loader_class: loader_class(dataset, *args, **options))
        outcome: list[Any] = [loader]
        if not isinstance(loader, Raised):
            iterator = attempt(lambda loader=loader: iter(loader))
            outcome = ["made", attempt(lambda loader=loader: len(loader)), iterator]
            if not isinstance(iterator, Raised):
                outcome[2:] = steps(iterator, 4)
        seen.append([_unnamed(one) for one in outcome])
    same(*seen)


def _unnamed(outcome: Any) -> Any:
    """Leave out where an unpicklable or unprintable object lies in memory."""
    if isinstance(outcome, Raised):
        return outcome.kind, re.sub("0x[0-9a-f]+", "0x", outcome.line)
    return outcome


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("allowed", [1, None])
def test_more_workers_than_cpus(allowed, persistent, monkeypatch):
    """At construction and whenever workers are started."""
    monkeypatch.setattr(torch._utils, "cpu_count", lambda: allowed)
    seen = warned(
        lambda cls: cls(data.Plain(4), 2, num_workers=2, persistent_workers=persistent),
        lambda loader: [loader.check_worker_number_rationality(), *two_epochs(loader)],
    )
    assert len(seen) == (3 if persistent else 4)
    assert seen[0][1].startswith("This DataLoader will create 2 worker processes in total.")


@pytest.mark.parametrize("options", [{}, {"pin_memory_device": "cuda"}], ids=len)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_pinning_without_an_accelerator(options, workers, persistent, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    seen = warned(
        lambda cls: cls(
            data.Plain(4),
            pin_memory=True,
            num_workers=workers,
            persistent_workers=persistent and workers > 0,
            collate_fn=data.to_pinnable,
            **options,
        ),
        two_epochs,
    )
    assert any("no accelerator" in text for _, text in seen)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_a_stream_longer_than_promised(batch_size, workers):
    """Counted in batches, against a promise in samples; only what was said before the iterator was made holds."""

    def use(loader):
        iterator = iter(loader)
        return [attempt(lambda: len(loader)), list(iterator), *one_epoch(loader), list(loader)]

    seen = warned(lambda cls: cls(data.SizedWrongly(8), batch_size, num_workers=workers), use)
    assert bool(seen) == (batch_size != 3 or workers == 2)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_promise_is_kept_by_persistent_workers_too(persistent):
    seen = warned(
        lambda cls: cls(data.SizedWrongly(8), num_workers=1, persistent_workers=persistent),
        lambda loader: [list(loader), attempt(lambda: len(loader)), list(loader)],
    )
    assert len(seen) == 4


def warned(make: Any, use: Any) -> Any:
    """Assert parity, warnings included; return the warnings."""
    assert_parity(make, use)
    return observe(make, use, LOADERS[1])["warnings"]


class Unpicklable(data.Plain):
    def __init__(self, secret: Any) -> None:
        super().__init__()
        self.secret = secret


def _generator() -> Any:
    yield 1


@pytest.mark.parametrize("secret", [lambda: 1, _generator(), sys], ids=["lambda", "generator", "module"])
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_what_cannot_be_pickled(context, secret):
    def use(loader):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, beside the error; headrace adds a note to the error instead
            return attempt(lambda: iter(loader))

    error = assert_parity(lambda cls: cls(Unpicklable(secret), num_workers=1, multiprocessing_context=context), use)
    assert isinstance(error, Raised)
