"""Streams of tar shards: webdataset's samples, dealt exactly, in an order that seed and epoch decide."""

import bz2
import gzip
import lzma
import subprocess
import sys
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
    "tgz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
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


@pytest.mark.parametrize("suffix", list(PACKERS))
def test_compressed_archives(suffix: str, tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, 1)
    packed = tmp_path / f"a.{suffix}"
    packed.write_bytes(PACKERS[suffix](Path(path).read_bytes()))
    assert read(TarStream(packed, "cls", {})) == list(range(10))
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises((ShardCorrupt, zstandard.ZstdError)):
        read(TarStream(packed, "cls", {}))


def test_standard_input_and_commands(tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, 1)
    code = "from headrace import TarStream; print([one[0] for one in TarStream('-', 'cls', {})])"
    with open(path, "rb") as file:
        done = subprocess.run([sys.executable, "-c", code], stdin=file, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(list(range(10)))
    assert read(TarStream(f"pipe:cat {path}", "cls", {}, allow_commands=True)) == list(range(10))
    with pytest.raises(ValueError, match="is a shell command"):
        TarStream(f"pipe:cat {path}")
    with pytest.raises(ShardCorrupt, match="ended with exit code 3"):
        read(TarStream(f"pipe:cat {path}; exit 3", "cls", {}, allow_commands=True))
    reader = iter(TarStream(f"pipe:cat {path}; exec sleep 1000", "cls", {}, allow_commands=True))
    assert next(reader) == (0,)
    reader.close()  # type: ignore[attr-defined]


def test_what_was_cut_off_is_an_error_after_the_samples_before(tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, 1)
    whole = Path(path).read_bytes()
    for end in (1024 * 10, 1024 * 5, 1024 * 5 + 600, 1024 * 5 + 100):
        Path(path).write_bytes(whole[:end])
        found = []
        with pytest.raises(ShardCorrupt, match="cut off"):
            found += [sample[0] for sample in TarStream(path, "cls", {}) if not found.append(sample[0])]
        assert found == list(range(len(found)))
        assert len(found) in (end // 1024, end // 1024 - 1)


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
def test_an_epoch_has_so_many_samples_whatever_the_workers(
    total: int, resampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = TarStream(numbered(tmp_path, 6), "cls", {}, shuffle=5, epoch_samples=total, resampled=resampled)
    alone = Alone(monkeypatch)
    for ranks, workers in ((1, 1), (2, 2), (3, 1), (4, 2)):
        shares = []
        for rank in range(ranks):
            read = [alone(dataset, rank, ranks, worker, workers) for worker in range(workers)]
            assert len(dataset) == sum(map(len, read))
            shares.append(len(dataset))
        assert sum(shares) == total
        assert max(shares) - min(shares) <= 1


def test_seed_and_epoch_decide_on_the_order(tmp_path: Path) -> None:
    paths = numbered(tmp_path, 6)
    dataset = TarStream(paths, "cls", {}, shuffle=20, seed=3)
    first = read(dataset)
    assert first == read(dataset) == read(TarStream(paths, "cls", {}, shuffle=20, seed=3))
    assert sorted(first) == list(range(60))
    assert first != list(range(60)) != read(TarStream(paths, "cls", {}, shuffle=20, seed=4)) != first
    dataset.set_epoch(1)
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
        assert alone(dataset, 0, 3, 0, 1) == [0, 3, 6, 9, 10, 13, 16, 19]


def test_a_worker_without_samples_does_not_read_for_ever(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [])
    with pytest.raises(ValueError, match="have no sample for worker 0 of 1"):
        list(TarStream(tmp_path / "a.tar", epoch_samples=5))


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
    with pytest.raises(ShardCorrupt, match="cut off"):
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
