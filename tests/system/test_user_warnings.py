"""Warnings name the user's line, in a loop, in a comprehension, in a generator, and where C code reads for the user."""

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executors.mortal_datasets import Mortal
from headrace import DataLoader
from headrace.system import user_warnings
from headrace.system.user_warnings import warn_user

HERE = "# here"

OPTIONS: dict[str, dict[str, Any]] = {
    "abandoned": {},
    "no accelerator": {"pin_memory": True},
    "killed": {"num_workers": 1, "multiprocessing_context": "fork"},
}


def in_a_loop(loader: Any) -> None:
    for _ in loader:  # here
        pass


def in_a_comprehension(loader: Any) -> None:
    _ = [type(batch) for batch in loader]  # here


def by_a_function_in_c(loader: Any) -> None:
    list(loader)  # here


def in_a_generator(loader: Any) -> None:
    def batches() -> Iterator[Any]:
        yield from loader  # here

    list(batches())


@pytest.mark.parametrize("read", [in_a_loop, in_a_comprehension, by_a_function_in_c, in_a_generator])
@pytest.mark.parametrize("how", OPTIONS)
def test_the_line_is_the_users(how: str, read: Callable[[Any], None], tmp_path: Path) -> None:
    if how == "no accelerator" and torch.accelerator.is_available():
        pytest.skip("there is one")
    dataset: Any = Mortal(tmp_path, [10], "scribble") if how == "killed" else range(30)
    loader = DataLoader(dataset, seed=1, **OPTIONS[how])
    if how == "abandoned":
        next(iter(loader))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        read(loader)
    lines, first = inspect.getsourcelines(read)
    expected = [(__file__, first + number) for number, line in enumerate(lines) if HERE in line]
    assert [(one.filename, one.lineno) for one in told if one.category is UserWarning] == expected


def test_where_all_callers_are_passed_the_outermost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_warnings, "_PASSED", (os.sep, "<"))
    with pytest.warns(UserWarning, match="^a word$"):
        warn_user("a word")
