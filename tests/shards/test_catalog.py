"""Indexes are made where there are none, found where they lie, and refused where they do not fit."""

import os
import pwd
import resource
import shutil
import warnings
from pathlib import Path

import pytest

from headrace.errors import ShardCorrupt
from headrace.shards import catalog
from headrace.shards.catalog import open_index
from headrace.shards.columns import read_columns
from headrace.shards.dataset import TarDataset
from headrace.shards.index import Index
from headrace.shards.scanning import scan
from shards.test_index import write


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace"


def shard(folder: Path, name: str = "a.tar", data: bytes = b"1") -> Path:
    folder.mkdir(exist_ok=True)
    return write(folder / name, [("k", {"cls": data})])


def refuse(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the system refuse to write into a folder, as a full disk does, and as missing rights do for all but root."""
    save = Index.save

    def saved(index: Index, path: Path) -> None:
        if folder in path.parents:
            raise OSError(28, "No space left on device")
        save(index, path)

    monkeypatch.setattr(Index, "save", saved)


def test_an_index_is_made_beside_the_shard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shard(tmp_path)
    assert open_index(path).key(0) == "k"
    assert (tmp_path / "a.tar.index").exists()
    monkeypatch.setattr(catalog, "scan", None)
    again = open_index(str(path))
    assert (again.key(0), again.shards[0].name) == ("k", str(path))


def test_or_in_the_cache_folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shard(tmp_path / "locked")
    refuse(monkeypatch, path.parent)
    open_index(path)
    assert not Path(f"{path}.index").exists()
    assert len(list(cache.iterdir())) == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(catalog, "scan", None)
    assert open_index("locked/a.tar").shards[0].name == "locked/a.tar"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    refuse(monkeypatch, path.parent)
    shard(path.parent, data=b"2" * 4000)  # a shard that has changed is indexed anew
    assert len(open_index(path)) == 1
    assert len(list(cache.iterdir())) == 2


def test_or_in_memory_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [shard(tmp_path), shard(tmp_path, "b.tar")]
    refuse(monkeypatch, tmp_path)
    with pytest.warns(UserWarning, match=r"index of .*a\.tar and of 1 more cannot be written") as seen:
        assert len(TarDataset(paths)) == 2
    assert seen[0].filename == __file__


@pytest.mark.parametrize("cache_home", ["a.tar", None])
def test_or_where_there_is_no_cache_folder(
    cache_home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be reached, or the user has no home: an index in memory, no folder named `~`."""
    path = shard(tmp_path)
    refuse(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    if cache_home is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache_home))
    with pytest.warns(UserWarning, match="cannot be written"):
        assert open_index(path).key(0) == "k"
    assert os.listdir(tmp_path) == ["a.tar"]


@pytest.mark.parametrize("place", [0, 8, 40, -1])
def test_a_damaged_index_in_the_cache_folder_is_made_again(
    place: int, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shard(tmp_path / "locked")
    refuse(monkeypatch, path.parent)
    open_index(path)
    (cached,) = cache.iterdir()
    whole = cached.read_bytes()
    damaged = bytearray(whole)
    at = read_columns(cached)[0].places["keys"].first if place < 0 else place
    damaged[at] ^= 1
    cached.write_bytes(damaged)
    assert open_index(path).key(0) == "k"
    assert cached.read_bytes() == whole


def test_a_disk_that_fills_up_leaves_no_part_of_an_index(tmp_path: Path, cache: Path) -> None:
    path = shard(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.warns(UserWarning, match="cannot be written"):
            assert len(open_index(path)) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.tar", "cache"]
    assert list(cache.iterdir()) == []


def test_what_is_in_no_index_is_said_when_one_is_made(tmp_path: Path) -> None:
    paths = [shard(tmp_path, name) for name in ("a.tar", "b.tar")]
    for path in paths:
        path.write_bytes(path.read_bytes() * 2)
    with pytest.warns(
        UserWarning, match=r"a\.tar: the archive ends at byte 2048, and 1 members.*There are 1 more"
    ) as seen:
        dataset = TarDataset(paths)
    assert seen[0].filename == __file__
    assert len(dataset) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TarDataset(paths)


def test_an_index_of_another_shard_is_refused(tmp_path: Path) -> None:
    path, other = shard(tmp_path), shard(tmp_path, "b.tar")
    open_index(path)
    shutil.copy(f"{path}.index", f"{other}.index")
    with pytest.raises(ShardCorrupt, match=r"b\.tar\.index is not the index of b\.tar"):
        open_index(other)
    Index.join([scan(path), scan(other)]).save(Path(f"{other}.index"))
    with pytest.raises(ShardCorrupt, match=r"is not the index of b\.tar"):
        open_index(other)


def test_a_shard_that_has_another_size_is_refused(tmp_path: Path) -> None:
    path = shard(tmp_path)
    open_index(path)
    shard(tmp_path, data=b"2" * 10_000)
    with pytest.raises(
        ShardCorrupt, match=r"was made when the shard had 10240 bytes; now it has 20480.*headrace index"
    ):
        open_index(path)


def test_a_manifest_has_many_shards(tmp_path: Path) -> None:
    paths = [shard(tmp_path, f"{number}.tar", b"%d" % number) for number in range(3)]
    Index.join(list(map(scan, paths))).save(tmp_path / "all.index")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index = open_index(tmp_path / "all.index")
    assert [one.name for one in index.shards] == list(map(str, paths))
    assert not list(tmp_path.glob("*.tar.index"))


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_index(tmp_path / "a.tar")
    assert os.listdir(tmp_path) == []
