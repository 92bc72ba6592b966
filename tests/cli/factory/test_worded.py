"""An error of the user's code in a few lines: from this thread and from processes, with and without a plan."""

import pytest

from headrace import DataLoader
from headrace.cli.factory.worded import worded


class Broken:
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        if index == 4:
            raise ValueError("a torn file,\n  of two")
        return index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed", [None, 1])
def test_type_text_and_each_note_once(workers: int, seed: int | None) -> None:
    loader = DataLoader(Broken(), batch_size=3, num_workers=workers, seed=seed)
    with pytest.raises(ValueError, match="a torn file") as raised:
        list(loader)
    first, second, note, *rest = worded(raised.value).splitlines()
    assert (first, second) == ("ValueError: a torn file,", "  of two")
    assert note.startswith("headrace: while fetching sample 4")
    assert (", position 4 of epoch 0, step 1" in note) == (seed is not None)
    assert [line.partition(" (pid")[0] for line in rest] == ["headrace: in DataLoader worker process 0"] * workers


def test_without_text_or_notes() -> None:
    assert worded(KeyError("image")) == "KeyError: 'image'"
    assert worded(ValueError()) == "ValueError"


def test_a_text_of_the_users_own_that_ends_with_a_traceback() -> None:
    error = RuntimeError("it failed\nTraceback (most recent call last):\n  File here")
    assert "File here" in worded(error)
