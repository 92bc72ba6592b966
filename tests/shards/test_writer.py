"""What is written is read back, by webdataset too; the same samples make the same bytes; nothing half-written stays."""

import os
import pickle
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace.shards.dataset import TarDataset
from headrace.shards.encoding import encoded
from headrace.shards.index import Index
from headrace.shards.tar import members
from headrace.shards.writer import ShardWriter

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 7, 3), np.uint8)


def sample(number: int, **more: Any) -> dict[str, Any]:
    fields = {"__key__": f"d/{number:04}", "png": PIXELS, "cls": number % 10, "json": {"n": [number]}, "txt": "é" * 9}
    return fields | more


def write(folder: Path, count: int, pattern: str = "%03d.tar", **options: Any) -> ShardWriter:
    with ShardWriter(folder / pattern, **options) as writer:
        for number in range(count):
            writer.write(sample(number))
    return writer


def test_is_read_back(tmp_path: Path) -> None:
    import webdataset

    writer = write(tmp_path, 25, maxcount=10)
    assert (writer.total, writer.shards) == (25, [f"{tmp_path}/00{number}.tar" for number in range(3)])
    assert sorted(os.listdir(tmp_path)) == [f"00{number}.tar{end}" for number in range(3) for end in ("", ".index")]
    found = list(TarDataset(f"{tmp_path}/*.tar", decode="rgb8"))
    expected = list(webdataset.WebDataset(writer.shards, shardshuffle=False).decode("rgb8"))
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert [one["__key__"], one["cls"], one["json"], one["txt"]] == [
            f"d/{number:04}",
            number % 10,
            {"n": [number]},
            "é" * 9,
        ]
        for read in (one, other):
            assert np.array_equal(read.pop("png"), PIXELS)
        other.pop("__local_path__", None)
        assert one == other


def test_the_same_samples_make_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        write(folder, 5)
    first, second = ((folder / "000.tar").read_bytes() for folder in folders)
    assert first == second


def test_shards_are_no_larger_than_they_may_be(tmp_path: Path) -> None:
    writer = write(tmp_path, 30, maxsize=np.int32(30_000))
    assert len(writer.shards) > 3
    assert all(os.path.getsize(path) <= 30_000 for path in writer.shards)
    with ShardWriter(tmp_path / "large-%d.tar", maxsize=1, start_shard=7) as single:
        for number in range(2):
            single.write(sample(number))
    assert [os.path.basename(path) for path in single.shards] == ["large-7.tar", "large-8.tar"]


def test_an_error_leaves_what_is_complete(tmp_path: Path) -> None:
    def write_and_fail() -> None:
        with ShardWriter(tmp_path / "%d.tar", maxcount=2) as writer:
            for number in range(5):
                writer.write(sample(number))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_and_fail()
    assert sorted(os.listdir(tmp_path)) == ["0.tar", "0.tar.index", "1.tar", "1.tar.index"]
    with ShardWriter(tmp_path / "none-%d.tar"):
        pass
    assert len(os.listdir(tmp_path)) == 4


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the kernel refuse to write beyond so many bytes of a file, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def keys(folder: Path) -> list[str]:
    return [one["__key__"] for one in TarDataset(f"{folder}/*.tar")]


def test_a_sample_that_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    for name in ("failed", "clean"):
        (tmp_path / name).mkdir()
        writer = ShardWriter(tmp_path / name / "%d.tar")
        for number in range(3):
            large = {"__key__": str(number), "bin": bytes([number]) * 100_000, "cls": number}
            if number != 1:
                writer.write(large)
            elif name == "failed":
                with largest_file(150_000), pytest.raises(OSError, match="File too large"):
                    writer.write(large)
        writer.close()
        assert (keys(tmp_path / name), writer.total) == (["0", "2"], 2)
    assert (tmp_path / "failed" / "0.tar").read_bytes() == (tmp_path / "clean" / "0.tar").read_bytes()


def test_a_full_disk_leaves_no_part_of_a_shard_and_is_not_forgotten(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "%d.tar", maxcount=1)
    writer.write(sample(0))
    writer.write({"__key__": "large", "bin": bytes(107_000)})
    with largest_file(108_000), pytest.raises(OSError, match="File too large"):  # the archive's end does not fit
        writer.close()
    for again in (writer.close, lambda: writer.write(sample(1))):
        with pytest.raises(OSError, match=r"1.tar could not be completed, .* lost.*start_shard=1:"):
            again()
    assert (sorted(os.listdir(tmp_path)), writer.total) == (["0.tar", "0.tar.index"], 1)


def interrupted(call: Callable[[], object], line: int) -> bool:
    """Call a function, interrupt it at a line of the writer, and return whether it has so many."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if event == "line" and frame.f_code.co_filename.endswith("shards/writer.py"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("at_the_end", [False, True])
def test_an_interrupt_at_any_line_leaves_whole_samples_and_whole_shards(at_the_end: bool, tmp_path: Path) -> None:
    seen = set()
    for line in count(1):
        folder = tmp_path / str(line)
        folder.mkdir()
        writer = ShardWriter(folder / "%d.tar")
        writer.write({"__key__": "0", "txt": "a", "cls": 1})
        second = {"__key__": "1", "txt": "b", "cls": 2}
        reached = interrupted(writer.close if at_the_end else partial(writer.write, second), line)
        with suppress(OSError):  # which says that the shard is lost
            writer.close()
        seen.add(writer.total)
        assert sorted(os.listdir(folder)) == (["0.tar", "0.tar.index"] if writer.total else [])
        if writer.total:
            assert [(one["__key__"], len(one)) for one in TarDataset(writer.shards)] == [("0", 4), ("1", 4)][
                : writer.total
            ]
        if not reached:
            break
    assert seen == ({0, 1} if at_the_end else {1, 2})


def test_checksums(tmp_path: Path) -> None:
    write(tmp_path, 3, checksums=True)
    assert TarDataset(tmp_path / "000.tar", "cls", {}, verify=True)[2] == (2,)
    assert Index.load(tmp_path / "000.tar.index").shards[0].samples == 3


def test_names_that_need_extension_headers(tmp_path: Path) -> None:
    keys = ["é" * 70 + "/" + "x" * 150, "plain"]
    with ShardWriter(tmp_path / "%d.tar") as writer:
        for key in keys:
            writer.write({"__key__": key, "cls": 1})
    assert [TarDataset(writer.shards).key(number) for number in range(2)] == keys
    data = Path(writer.shards[0]).read_bytes()
    assert [one.name for one in members(memoryview(data), "a")] == [f"{key}.cls" for key in keys]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("cls", torch.tensor(3), b"3"),
        ("id", np.int64(3), b"3"),
        ("txt", "é", "é".encode()),
        ("jpg", b"as it is", b"as it is"),
        ("x.json", [1], b"[1]"),
        ("pkl", {1}, pickle.dumps({1})),
        ("bin", bytearray(b"x"), b"x"),
    ],
)
def test_encoding(field: str, value: Any, expected: bytes) -> None:
    assert encoded(field, value) == expected


@pytest.mark.parametrize("value", [PIXELS, torch.from_numpy(PIXELS).permute(2, 0, 1), Image.fromarray(PIXELS)])
def test_images(value: Any, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "%d.tar") as writer:
        writer.write({"__key__": "a", "png": value, "l.png": PIXELS[:, :, :1], "jpg": value, "npz.gz": {"x": PIXELS}})
    png, grey, jpg, arrays = TarDataset(writer.shards, "png l.png jpg npz.gz", "rgb8")[0]
    assert np.array_equal(png, PIXELS)
    assert np.array_equal(grey[:, :, 0], PIXELS[:, :, 0])
    assert jpg.shape == PIXELS.shape
    assert np.array_equal(arrays["x"], PIXELS)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"__key__": 3}, TypeError, r"sample\['__key__'\]=3 is not allowed"),
        ({"__key__": "a.b", "cls": 1}, ValueError, "key 'a.b' with field 'cls' is not allowed"),
        ({"__key__": "a", "JPG": b""}, ValueError, "a field in lower case"),
        ({"__key__": "a", "x/y": b""}, ValueError, "without '/'"),
        ({"__key__": "", "x": b""}, ValueError, "key ''"),
        ({"__key__": "a\0b", "x": b""}, ValueError, "but for NUL"),
        ({"__key__": "a", "x\0y": b""}, ValueError, "but for NUL"),
        ({"__key__": "a\ud800", "x": b""}, ValueError, "bytes of UTF-8"),
        ({"__key__": "\udcc3\udca9", "x": b""}, ValueError, "bytes of UTF-8"),
        ({"__key__": "k" * 2**20, "x": b""}, ValueError, "up to 65,536 bytes"),
        (None, TypeError, "sample=None is not allowed"),
        ({"__key__": "a", 3: b""}, TypeError, "field=3 is not allowed"),
        ({"__key__": "a", "txt": "\ud800"}, TypeError, "field 'txt' cannot hold a str"),
        ({"__key__": "a", "jpg": Image.new("RGBA", (2, 2))}, TypeError, "field 'jpg' cannot hold a Image"),
        ({"__key__": "a", "pkl": lambda: 0}, TypeError, "field 'pkl' cannot hold a function"),
        ({"__key__": "a"}, ValueError, "sample 'a' has no field"),
        ({"__key__": "a", "weird": 3}, TypeError, "field 'weird' with a int is not allowed"),
        ({"__key__": "a", "cls": 1.5}, TypeError, "field 'cls' cannot hold a float: expected an integer"),
        ({"__key__": "a", "png": PIXELS / 2}, TypeError, "expected pixels of uint8, got float64"),
        ({"__key__": "a", "json": {1}}, TypeError, "field 'json' cannot hold a set"),
    ],
)
def test_samples_that_would_not_be_read_back(
    wrong: Mapping[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with ShardWriter(tmp_path / "%d.tar") as writer:
        with pytest.raises(error, match=text):
            writer.write(wrong)
        writer.write(sample(0))
        with pytest.raises(ValueError, match="the sample before it has the same key"):
            writer.write(sample(0))
        writer.write(sample(1))
        with pytest.raises(ValueError, match="with bin is not allowed: the shard has a sample of this key"):
            writer.write({"__key__": sample(0)["__key__"], "bin": b""})
    assert len(TarDataset(writer.shards)) == 2


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"pattern": "a.tar"}, ValueError, "pattern='a.tar' is not allowed"),
        ({"pattern": "%d-%d.tar"}, ValueError, "a place for a number"),
        ({"pattern": "%x.tar"}, ValueError, "a place for a number"),
        ({"pattern": 3}, TypeError, "pattern=3"),
        ({"pattern": "%d.tar.gz"}, ValueError, "the name of a plain tar file"),
        ({"pattern": "%d.TAR.ZST"}, ValueError, "the name of a plain tar file"),
        ({"pattern": "%d.index"}, ValueError, "the name of a plain tar file"),
        ({"pattern": "pipe:cat > %d.tar"}, ValueError, "a path of this machine"),
        ({"pattern": "s3://bucket/%d.tar"}, ValueError, "a path of this machine"),
        ({"maxcount": 0}, ValueError, "maxcount=0"),
        ({"maxsize": 0}, ValueError, "maxsize=0"),
        ({"maxsize": "3GB"}, TypeError, "maxsize='3GB'"),
        ({"maxsize": np.bool_(True)}, TypeError, "maxsize="),
        ({"maxsize": np.float32("nan")}, ValueError, "maxsize="),
        ({"start_shard": -1}, ValueError, "start_shard=-1"),
        ({"checksums": 1}, TypeError, "checksums=1"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ShardWriter(**{"pattern": "%d.tar"} | options)


@pytest.mark.parametrize(
    "existing", ["x-000.tar", "x-7.tar", "x-12345678.tar", "x-3.tar.index", "link", "dangling link"]
)
def test_no_file_is_replaced_and_no_set_is_mixed_with_an_older_one(existing: str, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("of another")
    old = tmp_path / ("x-001.tar" if "link" in existing else existing)
    if "link" in existing:
        old.symlink_to(tmp_path / ("none" if "dangling" in existing else "other"))
    else:
        os.link(tmp_path / "other", old)
    for spelled in (tmp_path, tmp_path / "folder" / ".."):
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(FileExistsError, match=f"{old.name} exists: who reads all shards of these names"):
            ShardWriter(spelled / "x-%03d.tar")
    write(tmp_path, 1, "x-%d-valid.tar")
    write(tmp_path, 1, "x%d.tar")
    added = write(tmp_path, 3, "x-%03d.tar", start_shard=13, maxcount=2)
    assert [os.path.basename(one) for one in added.shards] == ["x-013.tar", "x-014.tar"]
    with pytest.raises(FileExistsError, match=r"x-014.tar exists, and no file is replaced"):
        write(tmp_path, 3, "x-%03d.tar", start_shard=14)
    assert (tmp_path / "other").read_text() == "of another"


def test_of_two_writers_of_the_same_names_one_is_refused(tmp_path: Path) -> None:
    one, other = (ShardWriter(tmp_path / "%d.tar") for _ in range(2))
    one.write(sample(1))
    other.write(sample(2))
    one.close()
    with pytest.raises(FileExistsError, match=r"0.tar exists"):
        other.close()
    assert keys(tmp_path) == [sample(1)["__key__"]]
    assert sorted(os.listdir(tmp_path)) == ["0.tar", "0.tar.index"]


def test_shards_and_indexes_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write(tmp_path, 1)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o600"}
