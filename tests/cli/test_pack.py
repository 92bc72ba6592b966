"""`headrace pack` writes pictures and other shards into shards, the same bytes with any number of processes."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from commands import run_command
from headrace.shards.dataset import TarDataset
from scripts import ScriptServer
from shards.test_dataset import image, shards
from waiting import wait_until

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
        said = capsys.readouterr().out
        assert "3 shards, 10 samples" in said
        assert "classes: 0 class0, 1 class1, 2 class2; all are in" in said
        assert "the names of its class and file as 'json'" in said
        assert json.loads((tmp_path / jobs / "classes.json").read_text()) == {"class0": 0, "class1": 1, "class2": 2}
    assert len(os.listdir(tmp_path / "1")) == 7
    for name in ("0.tar", "1.tar", "2.tar", "2.tar.index"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
    dataset = TarDataset(f"{tmp_path}/1/*", decode="rgb8", verify=True)
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


def test_the_permutation_of_a_seed_never_changes_and_the_seed_may_be_left_out(
    datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {
        ("--shuffle",): "8521396740",
        ("--shuffle", "0"): "8521396740",
        ("--shuffle", "--jobs", "1"): "8521396740",
        ("--shuffle=3",): "1589076243",
    }
    for number, (options, keys) in enumerate(expected.items()):
        assert run(f"{datasets}:Ten", f"{tmp_path}/{number}-%d.tar", *options, monkeypatch=monkeypatch) == 0
        assert "".join(one["__key__"] for one in TarDataset(f"{tmp_path}/{number}-0.tar")) == keys


def test_a_source_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "same").symlink_to("data")
    (tmp_path / "links").mkdir()
    source = shards(tmp_path / "data")
    names = [os.path.basename(path) for path in source]
    pattern = names[0].replace("0", "%d", 1)
    assert [pattern % number for number in range(len(names))] == names
    for path, name in zip(source, names, strict=True):
        os.link(path, tmp_path / "links" / f"hard-{name}")
        (tmp_path / "links" / f"soft-{name}").symlink_to(path)
    TarDataset(source)  # makes indexes
    manifest = tmp_path / "links" / "all-0.tar.index"
    assert run_command("index", *source, "--manifest", str(manifest), monkeypatch=monkeypatch) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for packed, target in (
        ("::".join(source), f"data/{pattern}"),
        ("::".join(source), f"data/sub/../{pattern}"),
        (source[1], f"same/{pattern}"),
        ("::".join(source), f"data/{pattern.replace('%d', '%03d')}"),
        ("::".join(source), f"links/hard-{pattern}"),
        ("::".join(source), f"links/soft-{pattern}"),
        (str(manifest), "links/all-%d.tar"),
    ):
        arguments = packed, f"{tmp_path}/{target}", "--maxcount", "5", "--shuffle", "1", "--jobs", "2"
        assert run(*arguments, monkeypatch=monkeypatch) == 2
        assert "remove them, if they are no part of what is packed" in capsys.readouterr().err
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_second_set_is_refused_and_beside_another_it_is_not(
    datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ten = f"{datasets}:Ten"
    assert run(ten, f"{tmp_path}/a-%03d.tar", "--maxcount", "3", monkeypatch=monkeypatch) == 0
    capsys.readouterr()
    for pattern in ("a-%03d.tar", "a-%d.tar"):
        assert run(ten, f"{tmp_path}/{pattern}", "--maxcount", "9", monkeypatch=monkeypatch) == 2
        assert "a-000.tar exists, as do 7 more files of such names" in capsys.readouterr().err
    assert run(ten, f"{tmp_path}/a-b-%03d.tar", "--maxcount", str(10**23), monkeypatch=monkeypatch) == 0
    assert len(TarDataset(f"{tmp_path}/a-0*.tar")) == len(TarDataset(f"{tmp_path}/a-b-*.tar")) == 10


@pytest.mark.parametrize("name", ["Failing", "Racing"])
def test_an_error_leaves_no_shard_of_a_set(
    name: str, datasets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(f"{datasets}:{name}", "out/%d.tar", "--maxcount", "2", "--jobs", "2", monkeypatch=monkeypatch) == 2
    text, left = {
        "Failing": ("sample 7: field 'cls' cannot hold a NoneType", []),
        "Racing": ("out/4.tar exists, and no file is replaced", ["4.tar"]),
    }[name]
    assert text in capsys.readouterr().err
    assert os.listdir("out") == left


INTERRUPTED = """
import os, signal
from pathlib import Path
import psutil
from headrace.cli.app import app

class Interrupting:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        Path(__file__).with_name(f"pid-{os.getpid()}").touch()
        if index == 17:
            parent = psutil.Process(os.getppid())
            if KILLED:
                parent.kill()
            for process in [*parent.children(), parent]:  # as Ctrl-C does, which reaches all processes of a terminal
                process.send_signal(signal.SIGINT)
        return {"cls": index}

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    app()
"""


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_an_interrupt_leaves_no_shard_of_a_set_and_no_process(how: str, scripts: ScriptServer, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED.replace("KILLED", str(how == "killed")))
    options = "--maxcount", "2", "--jobs", "2"
    with scripts.start(script, "pack", f"{script}:Interrupting", f"{tmp_path}/out/%d.tar", *options) as running:
        assert running.wait() == (-signal.SIGKILL if how == "killed" else 130)
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert len(pids) in (1, 2)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert [name for name in os.listdir(tmp_path / "out") if not (how == "killed" and name.startswith("."))] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{}", "%d.tar"], "has no picture"),
        (["{}", "none/%d.tar"], "mkdir -p none"),
        (["{}", "%d/a.tar"], "expected a number in its last part"),
        (["{}", "%d.tar.zst"], "expected the name of a plain tar file"),
        (["{}", "%d.tar", "--shuffle", str(10**23)], "--shuffle=100000000000000000000000 is not allowed"),
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

class Ten:
    def __len__(self):
        return 10
    def __getitem__(self, index):
        return {"__key__": str(index), "cls": index}

class Failing(Ten):
    def __getitem__(self, index):
        return {"__key__": str(index), "cls": index if index < 7 else None}

class Racing(Ten):
    def __getitem__(self, index):
        if index == 5:
            open("out/4.tar", "x").close()
        return super().__getitem__(index)

class Empty(Ten):
    def __len__(self):
        return 0

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
    assert run(f"{datasets}:one", f"{tmp_path}/one-%d.tar", "--fields", "bin", monkeypatch=monkeypatch) == 0
    assert [sample["bin"] for sample in TarDataset(f"{tmp_path}/one-0.tar")] == [b"x", b"y"]


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("none", (), "has no none"),
        ("Empty", (), "Empty has no sample"),
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
