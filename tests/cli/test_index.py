"""`headrace index` makes indexes beside the shards or one for all, and says which shards it could not index."""

from functools import partial
from pathlib import Path

import pytest

from commands import run_command
from headrace.shards.dataset import TarDataset
from headrace.shards.index import SUM
from shards.test_index import write

run = partial(run_command, "index")


def shards(folder: Path, count: int = 3) -> None:
    for number in range(count):
        write(folder / f"{number}.tar", [(f"{number}{sample}", {"cls": b"%d" % sample}) for sample in range(4)])


def test_beside_each_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shards(tmp_path)
    assert run(f"{tmp_path}/{{0..2}}.tar", "--checksums", "--column", "cls", monkeypatch=monkeypatch) == 0
    assert "3 shards, 12 samples, 12 fields" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.tar.index"))) == 3
    dataset = TarDataset(f"{tmp_path}/*.tar", "cls", verify=True)
    assert dataset.column("cls").tolist() == [0, 1, 2, 3] * 3


def test_one_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shards(tmp_path)
    manifest = tmp_path / "all.index"
    arguments = f"{tmp_path}/0.tar", f"{tmp_path}/[12].tar", "--manifest", str(manifest), "--jobs", "2"
    assert run(*arguments, monkeypatch=monkeypatch) == 0
    assert sorted(tmp_path.glob("*.index")) == [manifest]
    dataset = TarDataset(manifest, "cls __key__", {})
    assert dataset[11] == (3, "23")
    assert SUM not in dataset.index.columns
    assert str(manifest) in capsys.readouterr().out.replace("\n", "")


def test_what_is_broken_is_named_and_the_others_are_indexed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards(tmp_path)
    (tmp_path / "1.tar").write_bytes((tmp_path / "0.tar").read_bytes()[:1500])
    assert run(f"{tmp_path}/*.tar", monkeypatch=monkeypatch) == 1
    said = capsys.readouterr().out.replace("\n", "")
    assert "1.tar is corrupt at byte" in said
    assert "2 shards, 8 samples" in said
    manifest = tmp_path / "all.index"
    assert run(f"{tmp_path}/*.tar", "--manifest", str(manifest), monkeypatch=monkeypatch) == 1
    assert not manifest.exists()


@pytest.mark.parametrize("manifest", ["0.tar.index", "folder/../1.tar.index", "shard.index", "soft.index", None])
def test_an_index_replaces_no_shard(
    manifest: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards(tmp_path)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "shard.index", [("0", {"cls": b"1"})])
    write(tmp_path / "shard", [("0", {"cls": b"1"})])
    (tmp_path / "soft.index").symlink_to("2.tar")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    paths = [f"{tmp_path}/{name}" for name in ("0.tar", "1.tar", "2.tar", "shard", "shard.index")]
    options = [] if manifest is None else ["--manifest", f"{tmp_path}/{manifest}"]
    assert run(*paths, *options, monkeypatch=monkeypatch) == 2
    assert "would replace" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere-*.tar"], "no file matches"),
        (["a.tar", "--manifest", "x"], "expected a name that ends in .index"),
        (["a.tar", "--jobs", "0"], "--jobs=0 is not allowed"),
    ],
)
def test_what_is_refused(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, monkeypatch=monkeypatch) == 2
    assert text in capsys.readouterr().err
