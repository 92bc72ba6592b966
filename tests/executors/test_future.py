"""Exceptions on their way from a worker: what is kept of them."""

import pickle
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from headrace.executors.future import Failure

WHERE = "in DataLoader worker process 0"


class WithMessage(Exception):
    message = "a class attribute"


class MessageAndCode(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message


class OwnText(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class SameText(Exception):
    def __str__(self) -> str:
        return "always the same"


class Unpicklable(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


class MissingKey(KeyError):
    pass


def undecodable() -> Exception:
    try:
        b"\xff".decode()
    except UnicodeDecodeError as error:
        return error
    raise AssertionError


def arrived(make: Callable[[], Exception]) -> Exception:
    """The exception as it reaches the rank."""
    try:
        raise make()
    except Exception as error:
        failure = Failure.of(error, WHERE)
    return pickle.loads(pickle.dumps(failure)).error()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: ValueError("broken"), {}),
        (lambda: KeyError("broken"), {}),
        (lambda: MissingKey("broken"), {}),
        (lambda: WithMessage("broken"), {}),
        (lambda: MessageAndCode(7, "broken"), {"code": 7, "message": "broken"}),
        (lambda: OwnText(404), {"status": 404}),
        (lambda: SameText("broken"), {"args": ("broken",)}),
        (lambda: FileNotFoundError(2, "broken", "/data/1"), {"errno": 2, "filename": "/data/1"}),
        (lambda: OSError(28, "broken"), {"errno": 28, "filename": None}),
        (lambda: ModuleNotFoundError("broken", name="only_here"), {"name": "only_here"}),
        (undecodable, {"encoding": "utf-8", "object": b"\xff", "reason": "invalid start byte"}),
        (lambda: subprocess.CalledProcessError(3, ["tar"]), {"returncode": 3, "cmd": ["tar"]}),
        (lambda: ExceptionGroup("broken", [ValueError("one"), OSError(5, "two")]), {"message": "broken"}),
    ],
)
def test_type_text_and_attributes_are_kept(make: Callable[[], Exception], kept: dict[str, Any]) -> None:
    error = arrived(make)
    assert type(error) is type(make())
    assert {name: getattr(error, name) for name in kept} == kept
    told = str(error) + str(error.__cause__)
    assert f"Caught {type(error).__name__} {WHERE}." in told
    assert "in arrived" in told, "the worker's traceback"
    assert str(make()).strip("'") in told
    assert [note for note in error.__notes__ if WHERE in note] == error.__notes__[:1]


def test_a_group_arrives_with_its_exceptions() -> None:
    error = arrived(lambda: ExceptionGroup("broken", [ValueError("one"), OSError(5, "two")]))
    assert isinstance(error, ExceptionGroup)
    assert [repr(one) for one in error.exceptions] == ["ValueError('one')", "OSError(5, 'two')"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Unpicklable(1, 2),
        lambda: type("Local", (Exception,), {})("1 and 2"),
        lambda: ExceptionGroup("1 and 2", [Unpicklable(1, 2)]),
    ],
)
def test_what_cannot_be_made_again_is_an_error_with_its_text(make: Callable[[], Exception]) -> None:
    error = arrived(make)
    assert type(error) is RuntimeError
    assert "in arrived" in str(error)
    assert "1 and 2" in str(error)
