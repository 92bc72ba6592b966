"""What the examples with pictures and with shards say: on one rank, on two, and on two nodes."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import Ranks
from scripts import ScriptServer

ROOT = Path(__file__).parents[2]
FOLDER, SHARDS, WEBDATASET = (
    ROOT / "examples" / f"{name}.py" for name in ("imagenet_folder", "imagenet_shards", "webdataset_ddp")
)
RANK = ROOT / "tests" / "rank.py"
LIMIT_S = 300


@pytest.mark.slow
def test_each_picture_is_counted_once_and_a_broken_one_is_replaced_by_the_same_in_any_world(tmp_path: Path) -> None:
    replaced = []
    for size in (2, 1):
        told = Ranks(FOLDER, size, tmp_path, "pictures").finish()
        (right,) = re.findall(r"^77 of 77 pictures were counted, each once; (\S+) of them", told, re.MULTILINE)
        assert float(right) > 0.4, "of seven classes, so it learns"
        line = r"^epoch (\d): (\S+) was replaced by (\S+): \w+Error: "
        replaced.append(re.findall(line, told, re.MULTILINE))
    assert replaced[0] == replaced[1]
    epochs, broken, others = zip(*replaced[0], strict=True)
    assert epochs == ("0", "1", "2", "3")
    assert set(broken) == {"train/rocket/0007.jpg"}
    assert not {*broken} & {*others}


@pytest.mark.slow
def test_a_folder_without_pictures_is_an_error_that_says_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "pictures" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "pictures" / "train" / "cat" / "notes.txt").touch()
    with pytest.raises(AssertionError, match="ValueError: no picture in pictures/train: expected a folder for each"):
        Ranks(FOLDER, 1, tmp_path, "pictures").finish()


@pytest.mark.slow
def test_shards_give_the_same_samples_to_one_rank_and_to_two_nodes(tmp_path: Path) -> None:
    def digests(told: str) -> list[tuple[str, str]]:
        return re.findall(r"^epoch (\d): 245 samples, digest (\w{16})$", told, re.MULTILINE)

    alone = digests(Ranks(SHARDS, 1, tmp_path, "pictures").finish())
    assert [epoch for epoch, _ in alone] == ["0", "1"]
    assert alone[0][1] != alone[1][1], "each epoch is shuffled anew"
    assert digests(on_two_nodes(tmp_path, SHARDS, "pictures")) == alone


def on_two_nodes(folder: Path, script: Path, *arguments: str) -> str:
    """Run a script by two torchruns, as two nodes of one rank each, and return what both printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *shared, f"--node-rank={node}"),
                *(str(RANK), str(script), *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        )
        for node in range(2)
    ]
    try:
        told = [node.communicate(timeout=LIMIT_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(told)
    return "".join(told)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_each_step_from_webdataset_gains_what_is_said(size: int, tmp_path: Path, scripts: ScriptServer) -> None:
    if size == 1:  # without torchrun
        with scripts.start(WEBDATASET, str(tmp_path / "shards")) as script:
            told = script.communicate()[0]
    else:
        told = Ranks(WEBDATASET, size, tmp_path, "shards").finish()
    numbers = r"samples \[(.+)\], steps \[(.+)\], twice (\d+), missing (\d+)"
    rows = re.findall(rf"^(\d, \w+): {numbers}, resumed exactly: (True|False|no state)$", told, re.MULTILINE)
    assert [name for name, *_ in rows] == ["0, WebLoader", "0, with_epoch", "1, DataLoader", "2, TarDataset"]
    assert [resumed for *_, resumed in rows] == ["no state", "no state", "True", "True"]
    plain, equal, moved, indexed = (
        ([*map(int, samples.split(", "))], [*map(int, steps.split(", "))], int(twice), int(missing))
        for _, samples, steps, twice, missing, _ in rows
    )
    assert indexed == ([296 // size] * size, [-(-296 // size // 16)] * size, 0, 0)
    assert moved == equal, "the pipeline is the same"
    assert sum(equal[0]) == 296 + equal[2] - equal[3], "what comes again is not missing elsewhere"
    assert equal[2] > 0
    assert len(set(equal[1])) == 1, "with_epoch makes steps equal"
    if size > 1:
        assert len(set(plain[1])) > 1, "whole shards do not"
        assert equal[3] > 0
