"""Hugging Face's Trainer on two ranks, both killed after a checkpoint; its subclass makes loaders of ours."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from launch import run_ranks

pytestmark = pytest.mark.slow


def test_hugging_faces_trainer(tmp_path: Path) -> None:
    """One test of all: its ranks run once, wherever tests are dealt to several processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent / "jobs" / "hf_trainer.py"
    ranks = run_ranks(script, 2, tmp_path, str(port), HF_HUB_OFFLINE="1")
    firsts = [json.loads((tmp_path / "first" / f"rank{rank}.json").read_text()) for rank in range(2)]
    check_shares(*(first["whole"]["epochs"] for first in firsts))
    for first, rank in zip(firsts, ranks, strict=True):
        check_steps(**first)
        check_predictions(first["whole"])
        assert rank["killed"]
        check_resumed(first["whole"], rank["resumed"])
        check_skipped(first["whole"]["epochs"], rank["skipped"]["epochs"])


def indices(epochs: list[Any]) -> list[list[int]]:
    return [[index for index, _ in epoch] for epoch in epochs]


def check_shares(*ranks: list[Any]) -> None:
    """The ranks share each epoch, one pad aside, and each is shuffled anew."""
    epochs = list(zip(*map(indices, ranks), strict=True))
    for one, other in epochs:
        assert len(one) == len(other) == 12
        assert set(one + other) == set(range(23))
    assert len(set(map(str, epochs))) == 3


def check_steps(whole: dict[str, Any], accumulated: dict[str, Any]) -> None:
    """The loader is ours to the end, also where the Trainer takes two batches a step."""
    for run, steps in ((whole, 18), (accumulated, 9)):
        assert run["steps"] == steps
        assert run["epochs"] == whole["epochs"]
        assert run["ours"]
        assert run["made by threads"]


def check_predictions(whole: dict[str, Any]) -> None:
    """They are each sample's, in order, without pads."""
    assert whole["predicted"] == list(range(13))
    assert whole["predicted by threads"]


def check_resumed(whole: dict[str, Any], resumed: dict[str, Any]) -> None:
    """With a callback that keeps the loader's state the rest is what it would have been, to the weights."""
    assert resumed["epochs"] == [whole["epochs"][1][4:], whole["epochs"][2]]
    assert resumed["steps"] == whole["steps"]
    assert resumed["weights"] == whole["weights"]
    assert resumed["ours"]
    assert resumed["made by threads"]


def check_skipped(whole: list[Any], skipped: list[Any]) -> None:
    """Without it the Trainer skips to the same samples, but reads the rest of that epoch with a loader of torch's."""
    rest, last = skipped
    assert indices([rest]) == indices([whole[1][4:]])
    assert rest != whole[1][4:], "they are augmented in another way"
    assert last == whole[2]
