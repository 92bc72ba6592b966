"""CPUs and memory of a process: of its machine, of its control groups in both versions, and its rank's share."""

import os
from pathlib import Path

import pytest

from headrace.system import limits
from headrace.system.limits import cpu_quota, free_memory, private_memory, rank_cpus, usable_cpus
from headrace.system.world import local_ranks

GIB = 2**30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("text", "expected"), [("max 100000", None), ("150000 100000", 1.5), ("400000 100000", 4.0), ("broken", None)]
)
def test_the_quota_of_a_control_group(text: str, expected: float | None, tmp_path: Path) -> None:
    write(tmp_path / "a/b/cpu.max", text)
    write(tmp_path / "groups", "1:name=systemd:/x\n0::/a/b")
    assert cpu_quota(tmp_path, tmp_path / "groups") == expected


def test_the_smallest_quota_of_all_groups_above(tmp_path: Path) -> None:
    for folder, quota in (("a/b/c", "max 100000"), ("a/b", "300000 100000"), ("a", "200000 100000")):
        write(tmp_path / folder / "cpu.max", quota)
    write(tmp_path / "groups", "0::/a/b/c")
    assert cpu_quota(tmp_path, tmp_path / "groups") == 2.0


@pytest.mark.parametrize(("quota", "expected"), [("-1", None), ("50000", 0.5)])
def test_the_quota_in_version_1(quota: str, expected: float | None, tmp_path: Path) -> None:
    write(tmp_path / "cpu/docker/cpu.cfs_quota_us", quota)
    write(tmp_path / "cpu/docker/cpu.cfs_period_us", "100000")
    write(tmp_path / "groups", "4:cpu,cpuacct:/docker\n3:memory:/docker\n0::/")
    assert cpu_quota(tmp_path, tmp_path / "groups") == expected


def test_a_container_whose_group_has_another_name_inside(tmp_path: Path) -> None:
    """Without a namespace of its own, a container reads the host's path, but sees its own group as the root."""
    write(tmp_path / "cpu.max", "250000 100000")
    write(tmp_path / "groups", "0::/kubepods/pod1/abc")
    assert cpu_quota(tmp_path, tmp_path / "groups") == 2.5


def test_without_a_control_group(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "none") is None
    assert free_memory(tmp_path, tmp_path / "none", tmp_path / "none") is None


def test_free_memory_is_what_machine_and_groups_have_left(tmp_path: Path) -> None:
    write(tmp_path / "meminfo", f"MemTotal: 9 kB\nMemAvailable:   {8 * GIB // 1024} kB")
    write(tmp_path / "groups", "0::/a/b")
    given = (tmp_path, tmp_path / "groups", tmp_path / "meminfo")
    assert free_memory(*given) == 8 * GIB
    write(tmp_path / "a/b/memory.max", "max")
    write(tmp_path / "a/b/memory.current", str(GIB))
    assert free_memory(*given) == 8 * GIB
    write(tmp_path / "a/memory.max", str(4 * GIB))
    write(tmp_path / "a/memory.current", str(3 * GIB))
    assert free_memory(*given) == GIB
    write(tmp_path / "a/memory.stat", f"anon 1\nactive_file {GIB}\ninactive_file {2 * GIB}")
    assert free_memory(*given) == GIB + 2 * GIB + GIB // 2, "most of the files' cache is given up when it is needed"


def test_free_memory_in_version_1(tmp_path: Path) -> None:
    write(tmp_path / "groups", "4:memory:/job")
    given = (tmp_path, tmp_path / "groups", tmp_path / "none")
    write(tmp_path / "memory/memory.limit_in_bytes", "9223372036854771712")
    write(tmp_path / "memory/memory.usage_in_bytes", "7")
    assert free_memory(*given) is None
    write(tmp_path / "memory/job/memory.limit_in_bytes", str(2 * GIB))
    write(tmp_path / "memory/job/memory.usage_in_bytes", str(GIB))
    write(tmp_path / "memory/job/memory.stat", "inactive_file 5\ntotal_inactive_file 1000\ntotal_active_file 100")
    assert free_memory(*given) == GIB + 1050


def test_no_memory_is_not_less_than_none(tmp_path: Path) -> None:
    write(tmp_path / "groups", "0::/")
    write(tmp_path / "memory.max", str(GIB))
    write(tmp_path / "memory.current", str(2 * GIB))
    assert free_memory(tmp_path, tmp_path / "groups", tmp_path / "none") == 0


def test_this_machine() -> None:
    assert 0 < rank_cpus() <= usable_cpus() <= (os.cpu_count() or 1)
    free = free_memory()
    assert free is None or free > 0


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="this system does not tell")
def test_private_memory_of_this_process() -> None:
    before = private_memory(os.getpid())
    more = bytearray(os.urandom(64)) * 2**20
    after = private_memory(os.getpid())
    assert before is not None
    assert after is not None
    assert 32 * 2**20 < after - before < 256 * 2**20
    assert len(more) == 64 * 2**20
    assert private_memory(2**30) is None


def test_ranks_share_the_cpus_but_not_those_that_one_of_them_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "affinity", lambda: set(range(8)))
    monkeypatch.setattr(limits, "cpu_quota", lambda: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(limits, "_is_pinned", lambda allowed: False)
    assert local_ranks() == 4
    assert rank_cpus() == 2
    monkeypatch.setattr(limits, "cpu_quota", lambda: 4.0)
    assert rank_cpus() == 1
    monkeypatch.setattr(limits, "_is_pinned", lambda allowed: True)
    monkeypatch.setattr(limits, "cpu_quota", lambda: None)
    assert rank_cpus() == 8


@pytest.mark.skipif(len(limits.affinity()) < 2, reason="it takes two CPUs to give one of them to a process")
def test_a_process_that_was_given_some_of_its_parents_cpus() -> None:
    assert not limits._is_pinned(limits.affinity())
    pid = os.fork()
    if not pid:
        os.sched_setaffinity(0, {min(limits.affinity())})
        os._exit(7 if limits._is_pinned(limits.affinity()) else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize("given", ["", "0", "several"])
def test_without_a_launcher_there_is_one_rank(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    assert local_ranks() == 1
