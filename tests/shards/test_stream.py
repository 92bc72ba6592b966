"""Streams of tar shards: webdataset's samples, dealt exactly, in an order that seed and epoch decide."""

import bz2
import errno
import gzip
import lzma
import os
import re
import subprocess
import sys
import tarfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from headrace import DataLoader, World
from headrace.errors import ShardCorrupt
from headrace.shards import stream as module
from headrace.shards.dataset import TarDataset
from headrace.shards.sources import Forward
from headrace.shards.stream import TarStream
from shards.test_dataset import image, shards
from shards.test_index import write

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def numbered(folder: Path, count: int, each: int = 10) -> list[str]:
    """Shards whose samples are numbered through."""
    return [
        str(write(folder / f"{shard}.tar", [(f"{one:04}", {"cls": b"%d" % one}) for one in range(start, start + each)]))
        for shard, start in enumerate(range(0, count * each, each))
    ]


def read(dataset: TarStream) -> list[int]:
    return [sample[0] for sample in dataset]


def test_the_samples_are_those_by_index(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    for fields, decode in ((None, None), ("png;jpeg __url__ cls", {}), ("__key__ cls", {})):
        assert list(TarStream(paths, fields, decode)) == list(TarDataset(paths, fields, decode))


@pytest.mark.parametrize("packer", list(PACKERS))
def test_compressed_archives(packer: str, tmp_path: Path) -> None:
    """Of two streams, as parallel programs write them; the name says nothing about that."""
    (path,) = numbered(tmp_path, 1)
    data, pack = Path(path).read_bytes(), PACKERS[packer]
    packed = tmp_path / "A.TAR.GZ"
    packed.write_bytes(pack(data[:5000]) + pack(data[5000:]))
    for shard in (packed, f"pipe:cat {packed}"):
        assert read(TarStream(shard, "cls", {}, allow_commands=True)) == list(range(10))
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ShardCorrupt, match=re.escape(str(packed))):
        read(TarStream(packed, "cls", {}))


def test_a_plain_archive_whose_first_name_looks_compressed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar.bz2", [("BZh91AY&SY", {"cls": b"1"})])
    assert read(TarStream(path, "cls", {})) == [1]


def test_standard_input_and_commands(tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, 1)
    code = "from headrace import TarStream; print([one[0] for one in TarStream('-', 'cls', {})])"
    with open(path, "rb") as file:
        done = subprocess.run([sys.executable, "-c", code], stdin=file, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(list(range(10)))
    assert read(TarStream(f"pipe:cat {path}", "cls", {}, allow_commands=True)) == list(range(10))
    with pytest.raises(ValueError, match="is a shell command"):
        TarStream(f"pipe:cat {path}")


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("cat {path}; exit 3", "ended with exit code 3"),
        ("false", "ended with exit code 1"),
        ("head -c 2000 {path}; kill -9 $$", r"was ended by signal 9 \(SIGKILL\)"),
        ("head -c 2000 {path}", "cut off"),
        ("(cat /proc/version; head -c 600 /dev/zero; sleep 1000) | cat", "checksum of a member's header"),
    ],
)
def test_commands_that_fail_are_not_waited_for(command: str, text: str, tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, 1)
    with pytest.raises(ShardCorrupt, match=text):
        read(TarStream("pipe:" + command.format(path=path), "cls", {}, allow_commands=True))


def test_a_command_and_what_it_started_end_when_its_reader_goes(tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, 1)
    os.mkfifo(tmp_path / "held")
    with open(os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK), "rb") as held:
        command = f"pipe:exec 3> {tmp_path}/held; echo >&3; cat {path}; sleep 1000 | cat"
        reader = iter(TarStream(command, "cls", {}, allow_commands=True))
        assert next(reader) == (0,)
        del reader
        os.set_blocking(held.fileno(), True)
        assert held.read() == b"\n"  # to the end, which comes when no process holds it any more


def test_an_error_of_the_disk_names_the_file() -> None:
    """Nothing can be read at the beginning of a process's memory."""
    with pytest.raises(OSError, match="/proc/self/mem") as caught:
        read(TarStream("/proc/self/mem", "cls", {}))
    assert caught.value.errno == errno.EIO


def test_what_was_cut_off_is_an_error_after_the_samples_before(tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, 1)
    whole = Path(path).read_bytes()
    for end in (1024 * 10, 1024 * 5, 1024 * 5 + 600, 1024 * 5 + 100, 100, 0):
        Path(path).write_bytes(whole[:end])
        found = []
        with pytest.raises(ShardCorrupt, match="cut off"):
            found += [sample[0] for sample in TarStream(path, "cls", {}) if not found.append(sample[0])]
        assert found == list(range(len(found)))
        assert len(found) in (end // 1024, max(0, end // 1024 - 1))


class Alone:
    """Reads as one of several workers of several ranks, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, dataset: TarStream, rank: int, ranks: int, worker: int, workers: int) -> list[int]:
        info = type("Info", (), {"id": worker, "num_workers": workers})
        self.monkeypatch.setattr(module, "resolve", lambda _: World(rank, ranks))
        self.monkeypatch.setattr(module, "get_worker_info", lambda: info)
        return read(dataset)


@pytest.mark.filterwarnings("ignore:.*shards are fewer than")
@pytest.mark.parametrize(("count", "ranks", "workers"), [(12, 1, 1), (12, 2, 3), (7, 2, 3), (2, 2, 3), (1, 4, 2)])
@pytest.mark.parametrize("shuffle", [0, 7])
def test_all_workers_together_read_everything_once(
    count: int, ranks: int, workers: int, shuffle: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, alone = TarStream(numbered(tmp_path, count), "cls", {}, shuffle=shuffle), Alone(monkeypatch)
    found: Counter[int] = Counter()
    for rank in range(ranks):
        for worker in range(workers):
            found.update(alone(dataset, rank, ranks, worker, workers))
    assert found == Counter(range(10 * count))


@pytest.mark.filterwarnings("ignore:.*shards are fewer than")
@pytest.mark.parametrize("total", [1, 50, 61, 300])
@pytest.mark.parametrize("resampled", [False, True])
def test_ranks_have_equal_shares_of_an_epoch_whatever_the_workers(
    total: int, resampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = TarStream(numbered(tmp_path, 6), "cls", {}, shuffle=5, epoch_samples=total, resampled=resampled)
    alone = Alone(monkeypatch)
    for ranks, workers in ((1, 1), (2, 2), (3, 1), (4, 2)):
        shares = set()
        for rank in range(ranks):
            shares.add(tuple(len(alone(dataset, rank, ranks, worker, workers)) for worker in range(workers)))
            assert len(dataset) == -(-total // ranks)
        (share,) = shares
        assert sum(share) == len(dataset)
        assert max(share) - min(share) <= 1


@pytest.mark.filterwarnings("ignore:.*shards are fewer than")
@pytest.mark.parametrize(
    ("count", "each", "ranks", "workers"), [(7, 9, 8, 1), (3, 2, 2, 4), (2, 3, 4, 2), (1, 7, 3, 3)]
)
@pytest.mark.parametrize("shuffle", [0, 4])
def test_fewer_shards_than_readers_are_dealt_evenly(
    count: int, each: int, ranks: int, workers: int, shuffle: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, alone, total = numbered(tmp_path, count, each), Alone(monkeypatch), count * each
    for samples in (None, total):
        dataset = TarStream(paths, "cls", {}, shuffle=shuffle, epoch_samples=samples)
        read = [alone(dataset, rank, ranks, worker, workers) for worker in range(workers) for rank in range(ranks)]
        sizes = [len(one) for one in read]
        assert max(sizes) - min(sizes) <= 1
        found = Counter(one for reader in read for one in reader)
        assert set(found) == set(range(total))
        assert found.total() == (total if samples is None else -(-total // ranks) * ranks)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (1, 3), (2, 3)])
def test_an_epoch_of_all_samples_has_each_once(
    ranks: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs' samples are each of them twice: the buffer mixes no two passes."""
    paths, alone = numbered(tmp_path, 6), Alone(monkeypatch)
    for passes in (1, 2):
        for shuffle in (1, 7, 1000):
            dataset = TarStream(paths, "cls", {}, shuffle=shuffle, epoch_samples=60 * passes)
            readers = [(rank, ranks, worker, workers) for rank in range(ranks) for worker in range(workers)]
            found = Counter(one for reader in readers for one in alone(dataset, *reader))
            assert found == Counter(list(range(60)) * passes)


def test_seed_and_epoch_decide_on_the_order(tmp_path: Path) -> None:
    paths = numbered(tmp_path, 6)
    dataset = TarStream(paths, "cls", {}, shuffle=20, seed=3)
    first = read(dataset)
    assert first == read(dataset) == read(TarStream(paths, "cls", {}, shuffle=20, seed=3))
    assert sorted(first) == list(range(60))
    assert first != list(range(60)) != read(TarStream(paths, "cls", {}, shuffle=20, seed=4)) != first
    begun = iter(dataset)
    dataset.set_epoch(1)
    assert [sample[0] for sample in begun] == first
    assert sorted(read(dataset)) == list(range(60))
    assert read(dataset) != first


def test_a_loader_reads_it_and_goes_on_from_a_state(tmp_path: Path) -> None:
    paths = numbered(tmp_path, 6)

    def loader() -> DataLoader[Any]:
        dataset = TarStream(paths, "cls", {}, shuffle=20, epoch_samples=64)
        return DataLoader(dataset, 8, num_workers=2, seed=0)

    first = loader()
    epochs = [[batch[0].tolist() for batch in first] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert [len(first), *map(len, epochs)] == [8, 8, 8]
    again = loader()
    reader = iter(again)
    begun = [next(reader)[0].tolist() for _ in range(3)]
    state = again.state_dict()
    del reader
    other = loader()
    other.load_state_dict(state)
    assert begun + [batch[0].tolist() for batch in other] == epochs[0]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_loader_without_a_seed_shuffles_each_epoch_anew(workers: int, persistent: bool, tmp_path: Path) -> None:
    paths = numbered(tmp_path, 6)

    def loader() -> DataLoader[Any]:
        dataset = TarStream(paths, "cls", {}, shuffle=20)
        return DataLoader(dataset, 8, num_workers=workers, persistent_workers=persistent)

    first, other = loader(), loader()
    epochs = [[batch[0].tolist() for batch in first] for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert all(sorted(one for batch in epoch for one in batch) == list(range(60)) for epoch in epochs)
    other.set_epoch(1)
    reader = iter(other)
    begun = [next(reader)[0].tolist() for _ in range(3)]
    again = loader()
    again.load_state_dict(other.state_dict())
    assert begun + [batch[0].tolist() for batch in again] == epochs[1]
    assert [batch[0].tolist() for batch in again] == epochs[2]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "size", "workers"), [(100, 32, 4), (130, 32, 4), (7, 2, 3), (64, 8, 2), (5, 8, 0)])
def test_the_length_of_a_loader_counts_each_workers_batches(
    samples: int, size: int, workers: int, drop_last: bool, tmp_path: Path
) -> None:
    dataset = TarStream(numbered(tmp_path, 4, 20), "cls", {}, epoch_samples=samples)
    loader = DataLoader(dataset, size, num_workers=workers, executor="thread" if workers else None, drop_last=drop_last)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(list(loader)) == len(loader)
    texts = [str(one.message) for one in caught]
    assert any("leaves no batch at all" in text for text in texts) == (len(loader) == 0)
    assert not any("was reported to be" in text for text in texts)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_behind_one_that_cannot_be_decoded_are_read(workers: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [(f"{one}", {"cls": b"x" if one % 3 == 1 else b"%d" % one}) for one in range(9)])
    reader = iter(DataLoader(TarStream(path, "cls", {"cls": int}), batch_size=None, num_workers=workers))
    found, errors = [], 0
    while True:
        try:
            found += next(reader)
        except ValueError:
            errors += 1
        except StopIteration:
            break
    assert (found, errors) == ([0, 2, 3, 5, 6, 8], 3)


def test_the_loader_knows_that_it_splits_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dataset = TarStream(numbered(tmp_path, 2), "cls", {})
    with pytest.warns(UserWarning, match=r"headrace\.TarStream has split"):
        list(DataLoader(dataset, 5, distributed=True))
    assert [batch[0].tolist() for batch in DataLoader(dataset, 5)] == [[10, 11, 12, 13, 14], [15, 16, 17, 18, 19]]


def test_fewer_shards_than_workers_are_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, alone = TarStream(numbered(tmp_path, 2), "cls", {}), Alone(monkeypatch)
    with pytest.warns(UserWarning, match="2 shards are fewer than 3 workers of all ranks"):
        assert alone(dataset, 0, 3, 0, 1) == [0, 3, 6, 9, 12, 15, 18]


def test_a_worker_without_samples_does_not_read_for_ever(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [])
    for resampled in (False, True):
        with pytest.raises(ValueError, match="in turn have no sample for worker 0 of 1"):
            list(TarStream(tmp_path / "a.tar", epoch_samples=5, resampled=resampled))


def test_errors_name_the_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [("a", {"cls": b"x"}), ("b", {"jpg": image(0)})])
    with pytest.raises(ValueError, match="invalid literal") as caught:
        list(TarStream(path, "cls", {}))
    assert caught.value.__notes__ == [f"headrace: sample 'a' of {path}, field 'cls'"]
    with pytest.raises(ValueError, match=r"sample 'b' of .* has no 'cls': it has jpg"):
        list(TarStream(path, "cls"))
    with pytest.raises(FileNotFoundError):
        list(TarStream(tmp_path / "b.tar"))


def test_memory_is_not_allocated_for_what_a_header_claims(tmp_path: Path) -> None:
    """A member that claims to have 2**60 bytes."""
    data = bytearray(write(tmp_path / "a.tar", [("a", {"cls": b"1"})]).read_bytes())
    data[124:136] = b"\x80" + (2**60).to_bytes(11)
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(ShardCorrupt, match="pass a larger max_sample_bytes"):
        list(TarStream(tmp_path / "a.tar"))
    with pytest.raises(ShardCorrupt, match="cut off"):
        list(TarStream(tmp_path / "a.tar", max_sample_bytes=2**62))


@pytest.mark.parametrize("fields", [{"a": 2**20}, {f"{number}": 0 for number in range(300)}], ids=["one", "many"])
def test_a_sample_has_a_limit(fields: dict[str, int], tmp_path: Path) -> None:
    samples = [(key, {field: bytes(size) for field, size in fields.items()}) for key in ("a", "b")]
    path = write(tmp_path / "a.tar", samples)
    need = sum(512 + len(f"a.{field}") + size for field, size in fields.items())
    packed = tmp_path / "b.tar"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for shard in (path, packed):
        assert len(list(TarStream(shard, max_sample_bytes=need))) == 2
        with pytest.raises(ShardCorrupt, match=f"more than {need - 1} bytes, the limit: 'a'"):
            list(TarStream(shard, max_sample_bytes=need - 1))


def test_extension_headers_have_a_limit_together(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"a": "1" * 600_000}) as tar:
        tar.addfile(header)
    block = (tmp_path / "a.tar").read_bytes()
    once = block[: 512 + (int(block[124:135], 8) + 511) // 512 * 512]
    other = once.replace(b" a=1", b" b=1")
    (tmp_path / "a.tar").write_bytes(once + once + block)
    assert list(TarStream(tmp_path / "a.tar")) == []
    (tmp_path / "a.tar").write_bytes(once + other + block)
    with pytest.raises(ShardCorrupt, match="extension headers hold more than 1048576 bytes together"):
        list(TarStream(tmp_path / "a.tar"))


def test_bytes_come_forward_only(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(100)))
    with open(tmp_path / "a", "rb") as file:
        data = Forward(file)
        assert [data[5:10], data[7:10], data[10:10], data[20:22], data[98:104]] == [
            bytes(range(5, 10)),
            bytes(range(7, 10)),
            b"",
            bytes((20, 21)),
            bytes((98, 99)),
        ]
        with pytest.raises(ValueError, match="were read before"):
            data[5:10]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"shuffle": -1}, ValueError, "shuffle=-1"),
        ({"seed": "a"}, TypeError, "seed='a'"),
        ({"epoch_samples": 0}, ValueError, "epoch_samples=0"),
        ({"resampled": True}, ValueError, "resampled=True is not allowed: expected False without epoch_samples"),
        ({"resampled": 1}, TypeError, "resampled=1"),
        ({"allow_commands": 1}, TypeError, "allow_commands=1"),
        ({"allow_pickle": 1}, TypeError, "allow_pickle=1"),
        ({"max_sample_bytes": 0}, ValueError, "max_sample_bytes=0"),
        ({"transform": 1}, TypeError, "transform=1"),
        ({"fields": 1}, TypeError, "fields=1"),
        ({"decode": "rgb16"}, ValueError, "decode='rgb16'"),
        ({"shards": []}, ValueError, "names no shard"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        TarStream(**{"shards": "a.tar"} | options)


def test_without_a_number_of_samples_there_is_no_length() -> None:
    with pytest.raises(TypeError, match="has no length"):
        len(TarStream("a.tar"))
