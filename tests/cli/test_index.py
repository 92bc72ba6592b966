"""`headrace index` makes indexes beside the shards or one for all, and says which shards it could not index."""

import tarfile
from functools import partial
from pathlib import Path

import pytest

from commands import run_command
from headrace.errors import ShardCorrupt
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


@pytest.mark.parametrize("command", ["index", "inspect"])
@pytest.mark.parametrize(
    ("made", "text"),
    [
        ("joined", "the archive ends at byte 5120, and 6 members after that are not read"),
        ("hole", "the archive ends at byte 3072, and 2 members after that are not read"),
        ("links", "1 fifos are skipped"),
        ("links", "2 links are skipped"),
    ],
)
def test_what_is_not_read_is_counted(
    command: str,
    made: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path / "a.tar", [(f"{sample}", {"cls": b"%d" % sample}) for sample in range(4)])
    data = path.read_bytes()
    if made == "joined":
        other = write(tmp_path / "b.tar", [(f"{sample}", {"cls": b"x"}) for sample in range(4, 7)]).read_bytes()
        data += other + other
    elif made == "hole":
        data = data[:2048] + bytes(1024) + data[2048:]
    path.write_bytes(data)
    if made == "links":
        with tarfile.open(path, "a") as tar:
            for name, kind in (("5.cls", tarfile.SYMTYPE), ("6.cls", tarfile.LNKTYPE), ("7.cls", tarfile.FIFOTYPE)):
                member = tarfile.TarInfo(name)
                member.type, member.linkname = kind, "0.cls"
                tar.addfile(member)
    assert run_command(command, str(path), monkeypatch=monkeypatch) == 1
    assert text in capsys.readouterr().out.replace("\n", "")
    assert (tmp_path / "a.tar.index").exists() == (command == "index")


@pytest.mark.parametrize("command", [["index"], ["inspect"], ["pack", "OUT"]])
def test_a_sample_in_parts_is_refused(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.tar", [("a", {"jpg": b"x"}), ("b", {"jpg": b"y"}), ("a", {"cls": b"1"})])
    rest = [f"{tmp_path}/out-%d.tar" for _ in command[1:]]
    assert run_command(command[0], str(path), *rest, monkeypatch=monkeypatch) != 0
    said = "".join(capsys.readouterr()).replace("\n", "")
    assert "the members of sample 'a' are not next to each other" in said
    assert "tar --sort=name" in said
    with pytest.raises(ShardCorrupt, match="sample 'a'"):
        TarDataset(path)
    assert not list(tmp_path.glob("*.index"))


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
