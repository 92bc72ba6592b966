"""What a fetch leaves changed is found, and named as the user's code names it."""

import itertools
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.verify.reads import recorded
from headrace.cli.verify.watch import Watch

MODULE = __name__
NUMBERS = itertools.count(3)
LOCAL = threading.local()
CACHE: dict[str, int] = {}
SHARED = multiprocessing.get_context("spawn").Value("i", 0, lock=False)
nothing: int | None = None


class Data:
    fetched = 0

    def __init__(self) -> None:
        self.parts = {"seen": [0]}

    def in_attribute(self) -> None:
        self.parts["seen"][0] += 1

    def in_class(self) -> None:
        Data.fetched += 1

    def new_in_class(self) -> None:
        type(self).found = True  # type: ignore[attr-defined]

    def in_module(self) -> None:
        global nothing
        nothing = 5

    def new_in_module(self) -> None:
        globals().update(found=1)
        assert found  # type: ignore[name-defined]  # noqa: F821

    def in_iterator(self) -> None:
        next(NUMBERS)

    def in_thread(self) -> None:
        LOCAL.drawn = 0.5

    def in_dictionary(self) -> None:
        _store(CACHE)

    def shared(self) -> None:
        SHARED.value += 1


def _store(where: dict[str, int]) -> None:
    where["a"] = 1


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (Data.in_attribute, ["dataset.parts['seen'][0] went from 0 to 1"]),
        (Data.in_class, [f"{MODULE}.Data.fetched went from 0 to 1"]),
        (Data.new_in_class, [f"{MODULE}.Data.found (a bool) is new"]),
        (Data.in_module, [f"{MODULE}.nothing went from None to 5"]),
        (Data.new_in_module, [f"{MODULE}.found (a int) is new"]),
        (Data.in_iterator, [f"{MODULE}.NUMBERS went from count(3) to count(4)"]),
        (Data.in_thread, [f"{MODULE}.LOCAL.drawn (a float) is new"]),
        (Data.in_dictionary, [f"{MODULE}.CACHE went from 0 items to 1 items", f"{MODULE}.CACHE['a'] (a int) is new"]),
        (Data.shared, [f"{MODULE}.SHARED went from 0 to 1"]),
    ],
)
def test_what_has_changed_is_named(act: Callable[[Data], None], words: list[str]) -> None:
    data = Data()
    watch = Watch(data)
    with recorded(watch.enter):
        act(data)
    assert [change.words for change in watch.changes()] == words


def test_a_file_that_is_read_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    with (tmp_path / "file").open("rb") as file:
        held: dict[str, Any] = {"file": file}
        watch = Watch(held)
        file.read(2)
        assert [change.words for change in watch.changes()] == ["dataset['file'] went from byte 0 to byte 2"]


def test_what_has_not_changed_is_not_named() -> None:
    data = Data()
    watch = Watch(data)
    with recorded(watch.enter):
        Data.__init__(data)
    assert not watch.changes()
