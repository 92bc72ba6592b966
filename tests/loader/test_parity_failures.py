"""Errors of the user's code, dead workers and timeouts come as torch's do, and are survived as well."""

import multiprocessing
import os
import re
import signal
import sys
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch

import parity_datasets as data
from headrace import DataLoader
from headrace.executors.process import peer
from parity_tools import LOADERS, Raised, assert_parity, attempt, steps
from waiting import wait_for_reapers

pytestmark = pytest.mark.timeout(180)

MAP, STREAM = data.Drawing(), data.Stream()


class ManyArguments(Exception):
    def __init__(self, code, where):
        super().__init__(f"{code} at {where}")


class Odd(Exception):
    def __str__(self):
        return "an odd one\nof two lines"


ERRORS: dict[str, Any] = {
    "ValueError": lambda: ValueError("wrong\non two lines"),
    "KeyError": lambda: KeyError("missing"),
    "IndexError": lambda: IndexError("beyond"),
    "StopIteration": lambda: StopIteration("early"),
    "many arguments": lambda: ManyArguments(3, "there"),
    "odd": lambda: Odd("text"),
    "OSError": lambda: FileNotFoundError(2, "No such file", "there"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    "AssertionError": AssertionError,
    "NotImplementedError": lambda: NotImplementedError(("a", 1)),
    "MemoryError": lambda: MemoryError("full"),
    "warning": lambda: UserWarning("as an error"),
    "group": lambda: ExceptionGroup("several", [ValueError("one")]),
}


class Failing(data.Drawing):
    """Raises for every fifth sample, from the third."""

    def __init__(self, error: str) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: Any) -> Any:
        if index % 5 == 3:
            raise ERRORS[self.error]()
        return super().__getitem__(index)


class FailingBulk(Failing):
    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]


class FailingStream(data.Stream):
    """Raises at the third sample, and then goes on or is at its end, by what makes its iterator."""

    def __init__(self, error: str, goes_on: bool) -> None:
        super().__init__()
        self.error, self.goes_on = error, goes_on

    def __iter__(self) -> Any:
        return map(self.check, range(self.length)) if self.goes_on else (self.check(one) for one in range(self.length))

    def check(self, number: int) -> int:
        if number == 2:
            raise ERRORS[self.error]()
        return number


def failing_collate(batch: Any) -> Any:
    if 3 in data.numbers_of(batch).tolist():
        raise ValueError("cannot be put together")
    return batch


def stopping_collate(batch: Any) -> Any:
    if 3 in data.numbers_of(batch).tolist():
        raise StopIteration("cannot be put together")
    return batch


MORE_KEPT = ("OSError", "UnicodeDecodeError", "group")
"""From workers these come with more than with torch; `tests/executors/test_future.py` has what."""


@pytest.mark.parametrize(
    ("error", "workers"), [*product(ERRORS, [0]), *product([one for one in ERRORS if one not in MORE_KEPT], [1, 2])]
)
def test_an_error_in_a_sample_is_survived(error, workers):
    for batch_size, shuffle in ((3, True), (None, False)):
        result = assert_parity(
            lambda cls, size=batch_size, shuffle=shuffle: cls(Failing(error), size, shuffle, num_workers=workers),
            lambda loader: steps(iter(loader), len(loader) + 2),
        )
        assert {Raised} < {type(one) for one in result}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"dataset": FailingBulk("KeyError"), "batch_size": 4},
        {"dataset": MAP, "batch_size": 4, "collate_fn": failing_collate},
        {"dataset": MAP, "batch_size": None, "collate_fn": failing_collate},
        {"dataset": MAP, "batch_size": 2, "collate_fn": stopping_collate},
        {"dataset": STREAM, "batch_size": 4, "collate_fn": failing_collate},
        {"dataset": STREAM, "batch_size": 2, "collate_fn": stopping_collate},
        *(
            {"dataset": FailingStream("ValueError", on), "batch_size": size}
            for on in (True, False)
            for size in (None, 2)
        ),
        {"dataset": FailingStream("StopIteration", True), "batch_size": 2},
        {"dataset": FailingStream("StopIteration", False), "batch_size": 2},
    ],
    ids=count(),
)
def test_errors_elsewhere_are_survived(options, workers):
    result = assert_parity(
        lambda cls: cls(**options, num_workers=workers), lambda loader: steps(iter(loader), data.LENGTH + 3)
    )
    assert Raised in {type(one) for one in result}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_does_not_harm_the_next_epoch_of_persistent_workers(workers):
    assert_parity(
        lambda cls: cls(Failing("ValueError"), 3, num_workers=workers, persistent_workers=True),
        lambda loader: [steps(iter(loader), 9), steps(iter(loader), 2), steps(iter(loader), 9)],
    )


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_survived(interruption, monkeypatch):
    monkeypatch.setitem(ERRORS, "interruption", interruption)
    assert_parity(lambda cls: cls(Failing("interruption"), 3), lambda loader: steps(iter(loader), 9))


class FailingSampler(data.Lazy):
    def __iter__(self) -> Any:
        yield from range(4)
        raise LookupError("no more")


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_error_in_the_sampler(workers):
    def use(loader):
        iterator = attempt(lambda: iter(loader))
        return iterator if isinstance(iterator, Raised) else steps(iterator, 9)

    for size in (1, 2):
        assert_parity(lambda cls, size=size: cls(MAP, size, sampler=FailingSampler(), num_workers=workers), use)


def fail_to_start(worker_id: int) -> None:
    raise ManyArguments(worker_id, "start") if worker_id else ValueError("no start")


class Unopened(data.Stream):
    def __iter__(self) -> Any:
        raise OSError("cannot be opened")


@pytest.mark.parametrize("dataset", [MAP, STREAM], ids=repr)
def test_an_error_in_worker_init(dataset):
    """Each worker's error comes at its first batch; torch's later ones speak of its own unbound variable."""
    result = assert_parity(
        lambda cls: cls(dataset, 4, num_workers=2, worker_init_fn=fail_to_start), lambda loader: steps(iter(loader), 2)
    )
    assert result == [
        Raised(ValueError, "Caught ValueError in DataLoader worker process 0."),
        Raised(RuntimeError, "Caught ManyArguments in DataLoader worker process 1."),
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_cannot_be_opened(workers):
    def use(loader):
        iterator = attempt(lambda: iter(loader))
        return ["at iter", iterator] if isinstance(iterator, Raised) else ["at next", *steps(iterator, 1)]

    assert_parity(lambda cls: cls(Unopened(), 4, num_workers=workers), use)


def _leave() -> None:
    os._exit(3)


def _be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _be_interrupted() -> None:
    raise KeyboardInterrupt


class Deadly(data.Plain):
    """Kills its worker at the fifth sample, when the main process waits for it."""

    def __init__(self, die: Any) -> None:
        super().__init__()
        self.die = die

    def __getitem__(self, index: Any) -> Any:
        if index == 4:
            stat = Path(f"/proc/{os.getppid()}/stat")
            while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "S":
                os.sched_yield()
            self.die()
        return super().__getitem__(index)


@pytest.mark.parametrize("die", [_leave, _be_killed, _be_interrupted, sys.exit], ids=lambda die: die.__name__)
def test_a_worker_that_dies(die, monkeypatch):
    look = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(look, "__defaults__", (0.1,))  # torch looks so often, in seconds, for workers that ended well

    def use(loader):
        seen = steps(iter(loader), 3)
        return [*seen[:2], (seen[2].kind, re.sub(r"\d+", "N", seen[2].line))]

    result = assert_parity(lambda cls: cls(Deadly(die), 2, num_workers=1, prefetch_factor=1), use)
    assert result[2] == (RuntimeError, "DataLoader worker (pid(s) N) exited unexpectedly")


def test_what_follows_a_death():
    """Torch's iterator then looks as if the epoch were finished; ours goes on saying that it is not."""
    loader = DataLoader(Deadly(_leave), 2, num_workers=1, prefetch_factor=1)
    assert [one.kind for one in steps(iter(loader), 5)[2:]] == [RuntimeError] * 3


class Blocked(data.Plain):
    """Waits at its third sample until someone writes to the pipe."""

    def __init__(self, pipe: int) -> None:
        super().__init__(6)
        self.pipe = pipe

    def __getitem__(self, index: Any) -> Any:
        if index == 2:
            os.read(self.pipe, 1)
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_timeout_is_survived():
    read_end, write_end = os.pipe()

    def use(loader):
        iterator = iter(loader)
        seen = steps(iterator, 3)
        os.write(write_end, b"x")
        return [*seen, *steps(iterator, 4)]

    result = assert_parity(lambda cls: cls(Blocked(read_end), 2, num_workers=1, timeout=1), use)
    assert result[1:3] == [Raised(RuntimeError, "DataLoader timed out after 1 seconds")] * 2
    os.close(read_end)
    os.close(write_end)


@pytest.mark.slow
def test_a_blocked_worker_is_ended(monkeypatch):
    monkeypatch.setattr(peer, "GRACE_S", 0.2)
    read_end, write_end = os.pipe()
    iterator = iter(LOADERS[1](Blocked(read_end), 3, num_workers=2, timeout=1))
    children = multiprocessing.active_children()
    assert len(children) == 2
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        next(iterator)
    sentinels = [child.sentinel for child in children]
    iterator._shutdown_workers()
    wait_for_reapers()
    assert not multiprocessing.active_children()
    assert all(sentinel > 0 for sentinel in sentinels)
    os.close(read_end)
    os.close(write_end)
