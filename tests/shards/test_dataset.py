"""Samples of tar shards by number: webdataset's samples, exact epochs, and never a wrong sample."""

import io
import os
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from headrace import DataLoader, Plan, World
from headrace.errors import ShardCorrupt
from headrace.plan.blocks import Blocks
from headrace.shards.dataset import TarDataset
from headrace.shards.index import Index
from headrace.shards.names import SUFFIX
from headrace.shards.scanning import scan
from headrace.shards.writer import ShardWriter
from shards.test_index import write


def image(number: int, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (9, 7, 3), np.uint8)).save(file, form)
    return file.getvalue()


def shards(folder: Path, sizes: tuple[int, ...] = (5, 3, 0, 9)) -> list[str]:
    """Shards with so many samples, numbered through; every third is a JPEG, the others are PNGs."""
    paths, number = [], 0
    for shard, size in enumerate(sizes):
        contents = []
        for _ in range(size):
            form = "JPEG" if number % 3 == 0 else "PNG"
            fields = {form.lower(): image(number, form), "cls": b"%d" % (number % 10), "big": bytes([number]) * 5000}
            contents.append((f"d/{number:04}", fields))
            number += 1
        paths.append(str(write(folder / f"{shard}.tar", contents)))
    return paths


def damaged(path: str, at: int, by: bytes = b"\xff") -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(by)


def place(path: str, field: str) -> int:
    with tarfile.open(path) as tar:
        return next(one.offset_data for one in tar if one.name.endswith(f".{field}"))


def theirs(paths: list[str], *steps: Any) -> list[Any]:
    import webdataset

    data = webdataset.WebDataset(paths, shardshuffle=False, empty_check=False)
    for name, *arguments in steps:
        data = getattr(data, name)(*arguments)
    return list(data)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return (
        bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else type(one) is type(other) and one == other
    )


def test_whole_samples_are_webdatasets(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    for decode, steps in ((None, []), ({}, [("decode",)]), ("rgb8", [("decode", "rgb8")])):
        found, expected = list(TarDataset(paths, decode=decode)), theirs(paths, *steps)
        assert len(found) == 17
        for one, other in zip(found, expected, strict=True):
            other.pop("__local_path__", None)
            assert equal(one, other)
            assert list(one) == list(other)


@pytest.mark.parametrize("fields", ["jpeg;png cls", "png;jpeg __key__ cls", "cls"])
def test_tuples_are_webdatasets(fields: str, tmp_path: Path) -> None:
    paths = shards(tmp_path)
    found = list(TarDataset(paths, fields, "rgb8"))
    assert all(map(equal, found, theirs(paths, ("decode", "rgb8"), ("to_tuple", *fields.split()))))


def test_any_sample_and_what_it_is_called(tmp_path: Path) -> None:
    dataset = TarDataset(f"{tmp_path}/*.tar" if shards(tmp_path) else "", ("cls", "__url__"), {})
    assert [dataset[one] for one in (16, 0, -1, 7)] == [
        (number % 10, f"{tmp_path}/{shard}.tar") for number, shard in ((16, 3), (0, 0), (16, 3), (7, 1))
    ]
    assert (dataset.key(7), dataset.shard(-1)) == ("d/0007", f"{tmp_path}/3.tar")
    assert dataset.block_sizes.tolist() == [5, 3, 0, 9]
    for outside in (17, -18):
        with pytest.raises(IndexError, match=f"sample {outside} of 17"):
            dataset[outside]


def test_only_the_wanted_fields_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, counted = TarDataset(shards(tmp_path), "cls"), []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *read: counted.append(read[1]) or pread(*read))
    dataset.read_many(range(17))
    assert counted == [513] * 17


def test_a_small_field_is_read_together_with_the_header_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"cls": b"3", "jpg": b"j" * 9000, "txt": b"t" * 4096, "json": b"{}", "npy": b"n" * 9000}
    path = write(tmp_path / "a.tar", [(key, fields) for key in "ab"])
    dataset, counted = TarDataset(path, "npy json jpg cls"), []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *read: counted.append(read[1]) or pread(*read))
    raw = dataset.read_many([1, 0])
    assert counted == [1024 + 345, 9000, 1024 + 345, 9000] * 2
    assert [dataset.decode(one) for one in raw] == [tuple(fields[name] for name in ("npy", "json", "jpg", "cls"))] * 2
    damaged(str(path), place(str(path), "jpg") - 512, b"b")  # in the middle of what is read at once
    with pytest.raises(ShardCorrupt, match=r"sample 'a' of .* the header of 'jpg' differs"):
        dataset[0]


def test_the_loader_shuffles_by_blocks_and_goes_on_anywhere(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    dataset = TarDataset(paths, "cls __key__", {}, streams=4, window=2)
    loader = DataLoader(dataset, 4, shuffle=True, seed=3)
    assert loader.plan().order == Blocks([5, 3, 0, 9], 4, 2)
    reader, keys = iter(loader), []
    for _ in range(2):
        keys += next(reader)[1]
    state = loader.state_dict()
    again = DataLoader(
        TarDataset(paths, "cls __key__", {}, streams=4, window=2), 4, shuffle=True, seed=3, num_workers=1
    )
    again.load_state_dict(state)
    for _, own in again:
        keys += own
    assert sorted(keys) == [f"d/{number:04}" for number in range(17)]
    assert sorted(keys) != keys
    in_order = [key for _, own in DataLoader(dataset, 4) for key in own]
    assert in_order == sorted(keys)


@pytest.mark.parametrize("world", [1, 3, 7])
def test_ranks_read_everything_once_however_few_the_shards(world: int, tmp_path: Path) -> None:
    dataset = TarDataset(shards(tmp_path), "cls")
    found: Counter[int] = Counter()
    for rank in range(world):
        plan = Plan(dataset.order, len(dataset), 2, World(rank, world), "exact", seed=1)
        for step in range(plan.steps(0)):
            found.update(plan.batch(0, step).tolist())
    assert found == Counter(range(17))


def crop(sample: tuple[Any, ...]) -> torch.Tensor:
    """An augmentation that draws."""
    return torch.from_numpy(sample[0])[random.randrange(3) :][:6, torch.randint(0, 2, ()) :][:, :5]


@pytest.mark.parametrize("batch_size", [1, 6])
def test_augmentations_do_not_depend_on_batches_or_workers(batch_size: int, tmp_path: Path) -> None:
    dataset = TarDataset(shards(tmp_path), "png;jpeg", "rgb8", crop)
    expected = torch.cat(list(DataLoader(dataset, 3, shuffle=True, seed=0)))
    found = torch.cat(list(DataLoader(dataset, batch_size, shuffle=True, seed=0, num_workers=2)))
    assert torch.equal(found, expected)


def test_spawned_workers_with_another_folder_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path)
    monkeypatch.chdir(tmp_path)
    dataset = TarDataset("{0..3}.tar", "__url__ cls", {})
    expected = list(dataset)
    copy = pickle.dumps(dataset)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert list(pickle.loads(copy)) == expected


def test_a_manifest_is_all_that_travels(tmp_path: Path) -> None:
    contents = [(f"{number:05}", {"cls": b"1"}) for number in range(5000)]
    paths = [write(tmp_path / f"{shard}.tar", contents[:1000]) for shard in range(2)]
    Index.join(list(map(scan, paths))).save(tmp_path / "all.index")
    dataset = TarDataset(tmp_path / "all.index", "cls", {})
    assert len(pickle.dumps(dataset)) < 2000
    assert pickle.loads(pickle.dumps(dataset))[1999] == (1,)


def test_damage_is_an_error_and_never_another_sample(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    dataset = TarDataset(paths, "cls")
    dataset[0]
    damaged(paths[0], place(paths[0], "cls") - 512 + 150)
    with pytest.raises(ShardCorrupt, match=r"sample 'd/0000' of .*0\.tar has changed .*: the header of 'cls' differs"):
        dataset[0]
    os.truncate(paths[1], 2048)
    with pytest.raises(ShardCorrupt, match=r"1\.tar has 2048 bytes and had"):
        dataset[5]
    os.unlink(paths[3])
    with pytest.raises(FileNotFoundError):
        dataset[16]


def test_damaged_data_is_found_where_there_are_checksums(tmp_path: Path) -> None:
    (path,) = shards(tmp_path, (4,))
    with pytest.raises(ValueError, match="the index has no checksums"):
        TarDataset(path, verify=True)
    scan(Path(path), sums=True).save(Path(f"{path}.index"))
    dataset = TarDataset(path, "big cls", verify=True)
    expected = dataset[0]
    damaged(path, place(path, "big") + 3000)
    with pytest.raises(ShardCorrupt, match="the data of 'big' differs"):
        dataset[0]
    assert TarDataset(path, "big cls")[0] != expected
    assert TarDataset(path, "cls", verify=True)[0] == expected[1:]


def test_a_broken_sample_is_replaced_where_that_is_chosen(tmp_path: Path) -> None:
    (path,) = shards(tmp_path, (12,))
    scan(Path(path), sums=True).save(Path(f"{path}.index"))
    dataset = TarDataset(path, "big __key__", {}, verify=True)
    damaged(path, place(path, "big") + 3000)
    with pytest.raises(ShardCorrupt) as caught:
        list(DataLoader(dataset, 4, shuffle=True, seed=0))
    assert "sample 'd/0000'" in str(caught.value)
    assert any("position" in note for note in caught.value.__notes__)
    loader = DataLoader(dataset, 4, shuffle=True, seed=0, on_error="replace")
    keys = [key for _, own in loader for key in own]
    assert loader.stats().replaced == 1
    assert len(keys) == 12
    assert set(keys) == {f"d/{number:04}" for number in range(1, 12)}


def test_a_sample_without_a_wanted_field_names_those_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [("a", {"jpg": b"1", "cls": b"2"}), ("b", {"png": b"1", "cls": b"2"})])
    dataset = TarDataset(path, "jpg cls")
    with pytest.raises(ValueError, match=r"sample 'b' of .*a\.tar has no 'jpg': it has png, cls\."):
        dataset[1]


def test_a_decoder_that_fails_names_its_sample(tmp_path: Path) -> None:
    dataset = TarDataset(write(tmp_path / "a.tar", [("a", {"jpg": b"no image"})]), decode="pil")
    with pytest.raises(OSError, match="cannot identify") as caught:
        dataset[0]
    assert caught.value.__notes__ == [f"headrace: sample 'a' of {tmp_path}/a.tar, field 'jpg'"]


def test_a_member_of_more_than_8_gib_is_passed_over(tmp_path: Path) -> None:
    """Its size does not fit into eleven octal digits. The file has holes: it takes no room."""
    path, large = tmp_path / "a.tar", 9 * 2**30
    with path.open("wb") as file:
        for name, size in (("a.bin", large), ("b.txt", 2)):
            member = tarfile.TarInfo(name)
            member.size = size
            file.write(member.tobuf(tarfile.GNU_FORMAT))
            if size == large:
                file.seek(size, os.SEEK_CUR)
        file.write(b"hi".ljust(512, b"\0") + bytes(1024))
    dataset = TarDataset(path, "bin;txt __key__")
    assert dataset[1] == (b"hi", "b")
    assert dataset.index.places([0]).size == [large]
    os.truncate(path, large)
    with pytest.raises(ShardCorrupt, match="cut off"):
        scan(path)


def test_no_memory_is_asked_for_that_only_the_index_claims(tmp_path: Path) -> None:
    """The file has holes: it takes no room."""
    path = write(tmp_path / "a.tar", [("a", {"cls": b"1"})])
    index, size = scan(path), 2**42
    os.truncate(path, size)
    claimed = dict(index.columns) | {"size": np.array([size // 2], np.uint64)}
    dataset = TarDataset(Index((index.shards[0]._replace(size=size),), index.names, claimed))
    with pytest.raises(ShardCorrupt, match="the header of 'cls' differs"):
        dataset[0]


def test_numbers_from_the_index(tmp_path: Path) -> None:
    (path,) = shards(tmp_path, (12,))
    scan(Path(path), values=["cls"]).save(Path(f"{path}.index"))
    dataset = TarDataset(path)
    assert dataset.column("cls").tolist() == [number % 10 for number in range(12)]
    with pytest.raises(ValueError, match=r"field='big' is not allowed: expected one of \['cls'\]"):
        dataset.column("big")


def test_a_thousand_shards_with_few_descriptors(tmp_path: Path) -> None:
    for number in range(1000):
        write(tmp_path / f"{number:03}.tar", [("a", {"cls": b"%d" % number})])
    script = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        from headrace import DataLoader
        from headrace.shards.dataset import TarDataset
        for _ in range(2):  # at the second time the indexes are there
            dataset = TarDataset(sys.argv[1], "cls", {})
        for workers in (0, 2):
            loader = DataLoader(dataset, 50, shuffle=True, seed=0, num_workers=workers)
            assert sorted(one for (batch,) in loader for one in batch.tolist()) == list(range(1000))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), f"{tmp_path}/*.tar"], check=True, timeout=300)


def test_a_shard_of_ours_that_is_written_anew_is_never_taken_for_the_former_one(tmp_path: Path) -> None:
    """The same keys and sizes, in headers without a time: only the data differs."""

    def written(numbers: list[int]) -> Path:
        with ShardWriter(tmp_path / "%d.tar") as writer:
            for place, number in enumerate(numbers):
                writer.write({"__key__": f"{place:03}", "cls": number % 7, "bin": bytes([number]) * 5000})
        return Path(writer.shards[0])

    path = written(list(range(50)))
    former = TarDataset(path)
    expected = list(former)
    shutil.copy2(path, copied := tmp_path / "copy.tar")
    os.utime(copied, (1, 1))
    path.unlink()
    path.with_name(path.name + SUFFIX).unlink()
    written([*range(1, 50), 0])
    assert former[0] == expected[0], "its file is still open"
    for number in range(50):
        with pytest.raises(ShardCorrupt, match="header"):
            TarDataset(former.index)[number]
    with tarfile.open(path) as tar:
        assert [one.isreg() for one in tar] == [True] * 100
    copied.rename(path)
    assert list(TarDataset(former.index)) == expected, "a time of the file does not matter"


def test_an_index_that_comes_again_in_a_batch(tmp_path: Path) -> None:
    dataset = TarDataset(
        write(tmp_path / "a.tar", [(f"{number}", {"cls": b"%d" % number}) for number in range(3)]), "cls"
    )
    for batch in ([0, 1, 2, 0], [2] * 9, [0, -3, 0, 2]):
        assert [dataset.decode(raw) for raw in dataset.read_many(batch)] == [(b"%d" % (one % 3),) for one in batch]
    assert dataset.read_many([]) == []


def test_says_what_it_is(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    expected = f"TarDataset('{tmp_path}/0.tar' and 3 more: 17 samples, fields jpeg, cls, big, png, decode=None)"
    assert repr(TarDataset(paths)) == expected
    (one,) = shards(tmp_path, (5,))
    (tmp_path / "0.tar.index").unlink()
    expected = f"TarDataset('{one}': 5 samples, fields png;jpeg, cls, decode='rgb8')"
    assert repr(TarDataset(one, "png;jpeg cls", "rgb8")) == expected


@pytest.mark.parametrize("wrong", [2.5, 2.0, "2", None, np.float64(2), torch.tensor([1, 2])])
def test_a_number_that_is_none_is_refused(wrong: Any, tmp_path: Path) -> None:
    dataset = TarDataset(shards(tmp_path))
    for call in (dataset.__getitem__, lambda one: dataset.read_many([0, one]), dataset.key, dataset.shard):
        with pytest.raises(TypeError, match=r"index=.* is not allowed: expected a whole number"):
            call(wrong)
    with pytest.raises(TypeError, match=r"field=5 is not allowed: expected a text"):
        dataset.column(5)  # type: ignore[arg-type]
    assert dataset[np.int64(2)] == dataset[torch.tensor(2)] == dataset[2]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"fields": 3}, TypeError, "fields=3 is not allowed"),
        ({"fields": ""}, ValueError, "fields='' is not allowed"),
        ({"fields": "jpg;;png  ;"}, ValueError, "none of them empty"),
        ({"fields": "npy"}, ValueError, "expected among jpeg, cls, big, png"),
        ({"decode": 3}, TypeError, "decode=3 is not allowed"),
        ({"transform": 3}, TypeError, "transform=3 is not allowed"),
        ({"allow_pickle": 1}, TypeError, "allow_pickle=1 is not allowed"),
        ({"verify": "yes"}, TypeError, "verify='yes' is not allowed"),
        ({"streams": 0}, ValueError, "streams=0 is not allowed"),
        ({"window": 0}, ValueError, "window=0 is not allowed"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=text):
        TarDataset(shards(tmp_path), **options)


def test_shards_without_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="have no sample"):
        TarDataset(shards(tmp_path, (0, 0)))
