"""`headrace pack` writes pictures and other shards into shards, the same bytes with any number of processes."""

import sys
from collections.abc import Iterator
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


DATASETS = """
import random
import numpy as np
import torch
from headrace import rng

class Noisy:
    def __init__(self):
        self.local = lambda: 0  # cannot be pickled: processes inherit the dataset
    def __len__(self):
        return 9
    def __getitem__(self, index):
        return torch.rand(2), random.random() + np.random.rand() + rng().random(), index

class Named:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return {"__key__": f"sample{index}", "txt": str(index)}

def forward():
    return iter("ab")

def one():
    return [b"x", b"y"]
"""


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("sys.path", sys.path[:])
    path = tmp_path / "datasets_to_pack.py"
    path.write_text(DATASETS)
    yield path
    sys.modules.pop("datasets_to_pack", None)


def test_any_dataset_with_the_same_draws_in_any_number_of_processes(
    datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():  # set where a rank runs the command
        monkeypatch.setenv(name, value)
    for jobs in ("1", "2"):
        (tmp_path / jobs).mkdir()
        arguments = f"{datasets}:Noisy", f"{tmp_path}/{jobs}/%d.tar", "--maxcount", "4", "--jobs", jobs
        assert run(*arguments, "--fields", "npy json cls", "--shuffle", "5", monkeypatch=monkeypatch) == 0
        for shard in range(3):
            assert (tmp_path / jobs / f"{shard}.tar").read_bytes() == (tmp_path / "1" / f"{shard}.tar").read_bytes()
    found = [
        (sample["npy"].tolist(), sample["json"], sample["cls"])
        for sample in TarDataset(f"{tmp_path}/1/*.tar", decode={})
    ]
    assert sorted(label for *_, label in found) == list(range(9))
    assert len({str(drawn) for *drawn, _ in found}) == 9


def test_a_dataset_that_names_its_fields(datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(f"{datasets}:Named", f"{tmp_path}/%d.tar", monkeypatch=monkeypatch) == 0
    found = [(sample["__key__"], sample["txt"]) for sample in TarDataset(f"{tmp_path}/0.tar")]
    assert found == [("sample0", b"0"), ("sample1", b"1")]
    assert run(f"{datasets}:one", f"{tmp_path}/%d.tar", "--fields", "bin", monkeypatch=monkeypatch) == 0
    assert [sample["bin"] for sample in TarDataset(f"{tmp_path}/0.tar")] == [b"x", b"y"]


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("none", (), "has no none"),
        ("forward", (), "expected a map-style dataset"),
        ("Noisy", (), "3 values, and --fields names 0"),
        ("Noisy", ("--fields", "npy cls"), "3 values, and --fields names 2"),
        ("one", ("--fields", "a/b"), "is not allowed"),
    ],
)
def test_datasets_that_are_refused(
    name: str,
    fields: tuple[str, ...],
    text: str,
    datasets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(f"{datasets}:{name}", f"{tmp_path}/%d.tar", *fields, monkeypatch=monkeypatch) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.glob("*.tar"))
