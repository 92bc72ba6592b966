"""`headrace pack` writes pictures and other shards into shards, the same bytes with any number of processes."""

from functools import partial
from pathlib import Path

import pytest

from commands import run_command
from headrace.shards.dataset import TarDataset
from shards.test_dataset import image, shards

run = partial(run_command, "pack")


def pictures(folder: Path) -> Path:
    for number in range(10):
        path = folder / f"class{number % 3}" / "in.side" / f"{number}.a.{'PNG' if number % 2 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(number, "PNG" if number % 2 else "JPEG"))
    (folder / "class0" / "notes.txt").write_text("no picture")
    return folder


def test_a_folder_of_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = pictures(tmp_path / "pictures")
    for jobs in ("1", "2"):
        (tmp_path / jobs).mkdir()
        arguments = str(source), f"{tmp_path}/{jobs}/%d.tar", "--maxcount", "4", "--jobs", jobs, "--checksums"
        assert run(*arguments, monkeypatch=monkeypatch) == 0
        assert "3 shards, 10 samples" in capsys.readouterr().out
    for name in ("0.tar", "1.tar", "2.tar", "2.tar.index"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    dataset = TarDataset(f"{tmp_path}/1/*.tar", decode="rgb8", verify=True)
    assert dataset.block_sizes.tolist() == [4, 4, 2]
    assert [sample["cls"] for sample in dataset] == [0] * 4 + [1] * 3 + [2] * 3
    for sample in dataset:
        path = source / sample["json"]["file"]
        assert path.parts[-3] == sample["json"]["class"]
        assert path.suffix.lower()[1:] in sample


def test_shards_are_cut_anew_and_permuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = shards(tmp_path)
    before = {sample["__key__"]: sample["big"] for sample in TarDataset(paths)}
    for name, options in (("plain", []), ("mixed", ["--shuffle", "3"])):
        (tmp_path / name).mkdir()
        arguments = "::".join(paths), f"{tmp_path}/{name}/%d.tar", "--maxcount", "6", *options
        assert run(*arguments, monkeypatch=monkeypatch) == 0
        found = {sample["__key__"]: sample["big"] for sample in TarDataset(f"{tmp_path}/{name}/*.tar")}
        assert found == before
        assert (list(found) == list(before)) == (name == "plain")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{}", "%d.tar"], "has no picture"),
        (["{}/none.tar", "%d.tar"], "No such file"),
        (["{}", "a.tar"], "pattern='a.tar' is not allowed"),
        (["{}", "%d.tar", "--maxcount", "0"], "--maxcount=0"),
        (["{}", "%d.tar", "--jobs", "0"], "--jobs=0"),
        (["{}", "%d.tar", "--shuffle", "-1"], "--shuffle=-1"),
    ],
)
def test_what_is_refused(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*(one.format(tmp_path) for one in arguments), monkeypatch=monkeypatch) == 2
    assert text in capsys.readouterr().err
