"""`headrace inspect` counts fields and names what is wrong; its page needs no other file."""

import bz2
import gzip
import lzma
import os
import re
from functools import partial
from pathlib import Path

import pytest

from commands import run_command
from headrace.shards.scanning import scan
from shards.test_dataset import image, shards
from shards.test_index import write

run = partial(run_command, "inspect")


def test_a_shard_without_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.tar", [(f"{one}", {"txt": b"x" * one, "cls": b"1"}) for one in range(1, 6)])
    assert run(str(path), monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "5 samples, 20,480 bytes" in said
    assert re.search(r"txt +5 +15 +1 +3 +5", said)
    assert os.listdir(tmp_path) == ["a.tar"]


def test_problems_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = [(f"{one}", {"txt": b"x"} | ({"cls": b"1"} if one > 4 else {})) for one in range(20)]
    path = write(tmp_path / "a.tar", [*contents, ("0", {"txt": b""})])
    other = write(tmp_path / "b.tar", contents)
    scan(other).save(tmp_path / "a.tar.index")
    assert run(str(path), monkeypatch=monkeypatch) == 1
    said = capsys.readouterr().out
    assert "1 keys come again later, and make samples of their own: '0'" in said
    assert "6 of 21 samples have no 'cls': '0', '1', '2' and 3 more" in said
    assert "1 samples have an empty 'txt'" in said
    assert "does not fit the shard" in said
    path.write_bytes(path.read_bytes()[:3000])
    assert run(str(path), monkeypatch=monkeypatch) == 1
    assert "cut off" in capsys.readouterr().out
    write(path, [])
    assert run(str(path), monkeypatch=monkeypatch) == 1
    assert "no member belongs to a sample" in capsys.readouterr().out


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    contents = [("<k>", {"png": image(0), "jpg": b"no image", "txt": b"<b>", "json": b"{", "bin": b"\0"})]
    path, page = write(tmp_path / "a.tar", contents * 1), tmp_path / "a.html"
    assert run(str(path), "--html", str(page), monkeypatch=monkeypatch) == 0
    text = page.read_text()
    assert "the first 1 samples are shown in" in capsys.readouterr().out
    assert text.count("data:image/jpeg;base64,") == 1
    for part in ("&lt;k&gt;", "txt: &lt;b&gt;", "bin: 1 bytes", "cannot identify image", "json: <em>Expecting"):
        assert part in text
    assert "http" not in text
    (many,) = shards(tmp_path, (12,))
    assert run(many, "--html", str(page), "--samples", "5", monkeypatch=monkeypatch) == 1  # some have no png
    assert page.read_text().count("<figure>") == 5


def test_other_kinds_of_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.tar", [("0", {"txt": b"x"})])
    scan(path).save(tmp_path / "a.index")
    for name, kind in (("gz", gzip), ("bz2", bz2), ("xz", lzma)):
        (tmp_path / f"{name}.tar").write_bytes(kind.compress(path.read_bytes()))
    for name, text in (("a.index", "but an index"), *((f"{one}.tar", "compressed by") for one in ("gz", "bz2", "xz"))):
        assert run(str(tmp_path / name), monkeypatch=monkeypatch) == 2
        assert f"{name} is no plain tar shard, " in (said := capsys.readouterr().err)
        assert text in said


@pytest.mark.parametrize("page", ["a.tar", "other.tar", "a.tar.index", "hard.html", "soft.html", "a"])
def test_a_page_replaces_no_shard(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.tar", [("0", {"txt": b"x"})])
    write(tmp_path / "other.tar", [("0", {"txt": b"x"})])
    scan(path).save(tmp_path / "a.tar.index")
    os.link(path, tmp_path / "hard.html")
    (tmp_path / "soft.html").symlink_to("a.tar.index")
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    assert run(str(path), "--html", str(tmp_path / page), monkeypatch=monkeypatch) == 2
    assert f"{page}' is not allowed" in capsys.readouterr().err
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(tmp_path / "a.tar"), monkeypatch=monkeypatch) == 2
    assert "No such file" in capsys.readouterr().err
    assert run(str(tmp_path), "--samples", "0", monkeypatch=monkeypatch) == 2
    assert "--samples=0" in capsys.readouterr().err
