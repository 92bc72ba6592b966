"""Slots: reused when the user drops batches, more of them while the user keeps batches, and never overwritten."""

import gc
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from headrace import DataLoader
from headrace.errors import SlotTooLarge
from headrace.memory.codec import SlotWriter, lift, slot_collate
from headrace.memory.pickling import decode
from headrace.memory.slots import Loans, Mapping, Ring, anonymous_file
from headrace.system.limits import free_memory

LARGE = 100_000


class Line:
    """A worker's writer and a rank's reader, connected by sockets, in one process."""

    def __init__(self) -> None:
        self.ends = socket.socketpair()
        self.ring = Ring(self.ends[0])
        self.writer = SlotWriter(self.ring)
        self.loans = Loans(self.ends[1])
        self.collate = slot_collate(self.writer, as_torch=False)

    def pass_on(self, samples: list[Any], collate: bool = True) -> Any:
        """Give spare slots back to the worker, then transfer one batch."""
        returned, dropped = self.loans.lend(tasks=1)
        for slot in returned:
            self.ring.release(slot)
        for slot in dropped:
            self.ring.forget(slot)
        self.writer.begin()
        message = self.writer.write(self.collate(samples) if collate else samples)
        return decode(lift([bytearray(part) for part in message], self.loans))


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    for end in made.ends:
        end.close()


@pytest.mark.parametrize("side", [4, 64])
def test_a_collated_batch_has_no_gaps_wherever_it_lies(line: Line, side: int) -> None:
    """Only torch's `stack` keeps the memory order of the samples' dimensions."""
    samples = [torch.rand(2, 3, side, side).to(memory_format=torch.channels_last) for _ in range(2)]
    assert not torch.stack(samples).is_contiguous()
    for _ in range(2):  # before there is a slot, and in it
        batch = line.pass_on(samples)
        assert batch.is_contiguous()
        assert torch.equal(batch, torch.stack(samples))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks it up in /proc")
def test_no_code_runs_when_memory_is_unmapped() -> None:
    """After an interrupt at the first line of a `__del__`, the memory would never be released."""
    descriptor = anonymous_file(LARGE)
    mapping = Mapping(descriptor, LARGE)
    os.close(descriptor)
    mapping.view()[0] = 7
    assert f"{mapping.address:x}-" in Path("/proc/self/maps").read_text()
    address, ran = mapping.address, []
    sys.setprofile(lambda frame, event, argument: ran.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        del mapping
    finally:
        sys.setprofile(None)
    assert ran == []
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def numbered(number: int, length: int = LARGE) -> torch.Tensor:
    return torch.full((length,), number)


def test_one_slot_serves_batches_that_are_let_go(line: Line) -> None:
    for number in range(20):
        batch = line.pass_on([numbered(number)] * 2)
        assert batch.shape == (2, LARGE)
        assert (batch == number).all()
        batch += 1
        del batch
    assert len(line.loans) == 1


def test_batches_that_are_kept_stay_as_they_are(line: Line) -> None:
    kept = [line.pass_on([numbered(number)]) for number in range(10)]
    assert len(line.loans) == 10
    for number, batch in enumerate(kept):
        assert (batch == number).all()
    view = kept[3][:, 5:]
    kept.clear()
    for number in range(20, 40):
        line.pass_on([numbered(number)])
    assert (view == 3).all(), "a view keeps its slot"
    assert len(line.loans) == 10


def test_a_slot_that_is_dropped_is_unmapped_and_never_written_again(line: Line) -> None:
    kept = [line.pass_on([numbered(number)]) for number in range(3)]
    del kept[1]
    assert len(line.loans.spare) == 1
    line.loans.drop()
    assert len(line.loans) == 2
    more = [line.pass_on([numbered(number)]) for number in range(10, 14)]
    assert [one[0, 0] for one in kept + more] == [0, 2, 10, 11, 12, 13]
    assert len(line.loans) == 6


def test_no_more_slots_go_back_than_there_are_tasks_for(line: Line) -> None:
    kept = [line.pass_on([numbered(number)]) for number in range(4)]
    kept.clear()
    assert len(line.loans.spare) == 4
    assert len(line.loans.lend(tasks=2)[0]) == 1
    assert len(line.loans.lend(tasks=2)[0]) == 1
    assert line.loans.lend(tasks=2) == ([], [])
    assert (line.loans.lent, len(line.loans.spare)) == (2, 2)


def test_a_batch_returns_without_the_garbage_collector(line: Line) -> None:
    gc.disable()
    try:
        for number in range(10):
            line.pass_on([{"image": numbered(number), "mask": (numbered(-number), "name")}])
        assert len(line.loans) == 1
    finally:
        gc.enable()


def test_a_larger_batch_retires_the_slots_before(line: Line) -> None:
    line.pass_on([numbered(1)])
    kept = line.pass_on([numbered(2)])
    for _ in range(3):
        assert (line.pass_on([numbered(3, 5 * LARGE)]) == 3).all()
    assert (kept == 2).all()
    del kept
    line.pass_on([numbered(4, 5 * LARGE)])
    line.pass_on([numbered(5)])
    assert len(line.loans) <= 2


def test_default_collation_writes_in_place(line: Line) -> None:
    line.pass_on([numbered(0)] * 2)
    line.writer.begin()
    batch = line.collate([{"x": numbered(1), "y": 1}, {"x": numbered(2), "y": 2}])
    message = line.writer.write(batch)
    batch["x"].fill_(9)  # after it was written: only a copy would not show it
    assert (decode(lift([bytearray(part) for part in message], line.loans))["x"] == 9).all()


class Whole(int):
    pass


@pytest.mark.parametrize(
    "samples",
    [
        [1, -2],
        [2**63 - 1, -(2**63)],
        [1.5, 2.0],
        [float("nan"), 1e300],
        [1, 2.5],
        [2.5, 1],
        [True, False],
        [True, 2],
        [2, True],
        [Whole(3), 4],
        [1, np.int32(3)],
        [np.float64(1.5), 2.5],
        [np.float32(1.5), np.float32(2)],
        [1, torch.tensor(3)],
        [2**63, 1],
        [1.5, "text"],
        [1, None],
        [torch.ones(2), torch.ones(2, dtype=torch.float64)],
        [torch.ones(2, dtype=torch.uint8), torch.ones(2)],
        [torch.ones(2, requires_grad=True), torch.ones(2)],
        [torch.ones(2), torch.ones(2, requires_grad=True)],
        [torch.ones(2), torch.ones(3)],
        [torch.ones(2), None],
        [torch.ones(2), 3],
        [(1, torch.ones(2)), (2, torch.zeros(2))],
        [(1, torch.ones(2)), (2,)],
        [{"a": 1, "b": 2.5}, {"a": 3, "b": 4.5}],
    ],
    ids=repr,
)
def test_default_collation_is_torch_s(line: Line, samples: list[Any]) -> None:
    assert outcome(line.collate, samples) == outcome(default_collate, samples)


def outcome(collate: Callable[[Any], Any], samples: list[Any]) -> str:
    try:
        batch = collate(samples)
    except Exception as error:
        return f"{type(error).__name__}: {error}, {error.__context__ is None}"
    return f"{type(batch)} {getattr(batch, 'dtype', None)} {batch!r}"


@pytest.mark.parametrize(
    "value",
    [
        [np.arange(LARGE), np.arange(LARGE, dtype=np.float32)],
        [b"x" * LARGE, "y" * LARGE],
        {"big": torch.arange(LARGE), "text": "z" * LARGE, "none": torch.empty(0)},
        [],
        None,
    ],
    ids=["arrays", "bytes", "mixed", "empty", "none"],
)
def test_anything_else_crosses_too(line: Line, value: Any) -> None:
    for _ in range(3):
        copy = line.pass_on(value, collate=False)
        assert repr(copy) == repr(value)
        assert type(copy) is type(value)


def test_who_keeps_the_labels_does_not_keep_the_images(line: Line) -> None:
    labels = [line.pass_on([(numbered(number), number)] * 2)[1] for number in range(10)]
    assert len(line.loans) == 1
    assert [one.tolist() for one in labels] == [[number] * 2 for number in range(10)]


def test_one_large_batch_is_forgotten(line: Line) -> None:
    line.pass_on([numbered(0, 50 * LARGE)])
    kept = [line.pass_on([numbered(1)]) for _ in range(20)]
    sizes = sorted(slot.size for slot in line.loans._slots.values())
    assert sizes[len(sizes) // 2 :][0] < 20 * LARGE * 8
    assert sum(size > 20 * LARGE * 8 for size in sizes) <= 9
    del kept


def test_small_batches_need_no_slot(line: Line) -> None:
    assert line.pass_on([torch.arange(10)]).tolist() == [list(range(10))]
    assert len(line.loans) == 0


def test_memory_that_is_refused_is_an_error_before_it_is_used() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(SlotTooLarge, match=r"needs 2000000 bytes of shared memory.*Use a smaller batch_size"):
            anonymous_file(2_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.skipif(free_memory() is None, reason="this system does not say how much memory is left")
def test_memory_that_is_not_there_is_refused_rather_than_taken() -> None:
    """The kernel would grant the memory, and then kill a process."""
    with pytest.raises(SlotTooLarge, match=r"\d+ bytes of memory are left"):
        anonymous_file((free_memory() or 0) + 2**30)


def test_a_worker_that_is_refused_memory_goes_on() -> None:
    """Sample 1 is larger than a file may be; the others are not."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, limits[1]))
    try:
        samples = [numbered(0), numbered(1, 10 * LARGE), numbered(2)]
        reader = iter(DataLoader(samples, batch_size=None, num_workers=1, seed=0))
        assert (next(reader) == 0).all()
        with pytest.raises(SlotTooLarge, match="which the system refuses") as caught:
            next(reader)
        assert not any("pickled" in note for note in getattr(caught.value, "__notes__", ()))
        assert (next(reader) == 2).all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0


def test_descriptors_do_not_grow_with_batches() -> None:
    reader = iter(DataLoader([numbered(number) for number in range(60)], batch_size=2, num_workers=2, seed=0))
    kept = [next(reader) for _ in range(5)]
    before = descriptors()
    kept += [next(reader) for _ in range(20)]
    assert descriptors() == before
    assert [batch[0, 0].item() for batch in kept] == list(range(0, 50, 2))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4")
def test_forty_descriptors_are_enough() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, limits[1]))
    try:
        kept = list(DataLoader([numbered(number) for number in range(100)], num_workers=4, seed=0))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [batch[0, 0].item() for batch in kept] == list(range(100))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory by other rules")
def test_freed_memory_is_reused_rather_than_faulted_in_anew() -> None:
    """Runs in a separate process, since malloc keeps its limits as long as a process lives."""
    script = (
        "import resource\n"
        "from headrace.memory.slots import keep_freed_memory\n"
        "keep_freed_memory()\n"
        "faults = []\n"
        "for _ in range(3):\n"
        "    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)\n"
        "    batch = [bytes([number]) * 600_000 for number in range(64)]\n"
        "    del batch\n"
        "print(faults[2] - faults[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180, check=True)
    assert int(done.stdout) < 1_000  # of 9,400 pages


@pytest.mark.parametrize("options", ["size=64k", "size=64k,ro"])
def test_the_system_s_shared_memory_folder_is_not_needed(tmp_path: Path, options: str) -> None:
    """Runs in a process with its own /dev/shm, too small or read-only; and with few descriptors."""
    mount = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("only root may mount another /dev/shm, on Linux")
    script = tmp_path / "rank.py"
    script.write_text(
        "import resource, torch\n"
        "from headrace import DataLoader\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "data = [torch.full((100_000,), number) for number in range(200)]\n"
        "kept = list(DataLoader(data, num_workers=4, seed=0))\n"
        "print([batch[0, -1].item() for batch in kept] == list(range(200)))\n"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" "$@"', sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


def test_kept_batches_outlive_loader_and_workers() -> None:
    kept = list(DataLoader([numbered(number) for number in range(8)], num_workers=2, seed=0))
    gc.collect()
    assert [batch[0, -1].item() for batch in kept] == list(range(8))
    kept[0] += 5
    assert (kept[0] == 5).all()
