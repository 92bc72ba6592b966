"""Files are read through few descriptors, by threads and forked processes, and only as they were indexed."""

import os
import pickle
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import ShardCorrupt
from headrace.shards import files as module
from headrace.shards.files import Files
from waiting import LIMIT_S


@pytest.fixture
def files() -> Iterator[Files]:
    made = Files()
    yield made
    made.close()
    assert not made._open


def some(folder: Path, count: int) -> list[str]:
    for number in range(count):
        (folder / f"{number}").write_bytes(bytes([number]) * 100)
    return [str(folder / f"{number}") for number in range(count)]


def test_ranges(files: Files, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(200)))
    assert files.read(str(tmp_path / "a"), 200, [(3, 2), (0, 1), (199, 1)]) == [b"\3\4", b"\0", b"\xc7"]


def test_few_are_open(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "most_open", lambda: 3)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        for number, path in enumerate(some(tmp_path, 10)):
            assert files.read(path, 100, [(99, 1)]) == [bytes([number])]
            assert len(os.listdir("/proc/self/fd")) <= before + 3
    assert list(files._open) == [str(tmp_path / name) for name in "789"]


def test_the_number_follows_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed, expected in ((64, 16), (1024, 256), (10**6, 256), (resource.RLIM_INFINITY, 256), (2, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, allowed=allowed: (allowed, allowed))
        assert module.most_open() == expected


def test_where_no_descriptor_is_left_its_own_are_given_up(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = some(tmp_path, 4)
    for path in paths[:3]:
        files.read(path, 100, [(0, 1)])
    opened, refused = os.open, [OSError(24, "Too many open files")]

    def first_refused(path: str, flags: int) -> int:
        if refused:
            raise refused.pop()
        return opened(path, flags)

    monkeypatch.setattr(os, "open", first_refused)
    assert files.read(paths[3], 100, [(0, 1)]) == [b"\3"]
    assert list(files._open) == paths[3:]


def test_a_file_that_is_being_read_stays_open(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "most_open", lambda: 1)
    paths = some(tmp_path, 3)
    begun, go_on, found = threading.Event(), threading.Event(), []
    pread = os.pread

    def slow(descriptor: int, count: int, start: int) -> bytes:
        if threading.current_thread() is reader:
            begun.set()
            assert go_on.wait(LIMIT_S)
        return pread(descriptor, count, start)

    monkeypatch.setattr(os, "pread", slow)
    reader = threading.Thread(target=lambda: found.extend(files.read(paths[0], 100, [(0, 1)])))
    reader.start()
    assert begun.wait(LIMIT_S)
    for path in paths[1:]:
        files.read(path, 100, [(0, 1)])
    go_on.set()
    reader.join(LIMIT_S)
    assert found == [b"\0"]


def test_another_size_is_an_error(files: Files, tmp_path: Path) -> None:
    (path,) = some(tmp_path, 1)
    with pytest.raises(ShardCorrupt, match="has 100 bytes and had 90"):
        files.read(path, 90, [(0, 1)])
    files.read(path, 100, [(0, 1)])
    os.truncate(path, 50)
    with pytest.raises(ShardCorrupt, match="has become shorter: it ends at byte 50"):
        files.read(path, 100, [(40, 20)])


def test_a_forked_process_reads_although_a_thread_held_the_lock(files: Files, tmp_path: Path) -> None:
    (path,) = some(tmp_path, 1)
    files.read(path, 100, [(0, 1)])
    with files._lock:
        pid = os.fork()
        if not pid:
            os._exit(files.read(path, 100, [(0, 1)]) != [b"\0"])
    assert os.waitpid(pid, 0)[1] == 0


def test_a_copy_opens_its_own(files: Files, tmp_path: Path) -> None:
    (path,) = some(tmp_path, 1)
    files.read(path, 100, [(0, 1)])
    copy = pickle.loads(pickle.dumps(files))
    assert not copy._open
    assert copy.read(path, 100, [(0, 1)]) == [b"\0"]
    copy.close()
