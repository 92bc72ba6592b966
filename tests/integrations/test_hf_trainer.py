"""Hugging Face's Trainer on two ranks, both killed after a checkpoint; its subclass makes loaders of ours."""

import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from launch import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank read in a first run, and after the second was killed."""
    folder = tmp_path_factory.mktemp("hf_trainer")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent / "jobs" / "hf_trainer.py"
    resumed = run_ranks(script, 2, folder, str(port), HF_HUB_OFFLINE="1")
    return [
        {**json.loads((folder / "first" / f"rank{rank}.json").read_text()), **found}
        for rank, found in enumerate(resumed)
    ]


def indices(epochs: list[Any]) -> list[list[int]]:
    return [[index for index, _ in epoch] for epoch in epochs]


def test_the_ranks_share_each_epoch_and_each_is_shuffled_anew(ranks: list[Any]) -> None:
    shares = [indices(rank["whole"]["epochs"]) for rank in ranks]
    for one, other in zip(*shares, strict=True):
        read = Counter(one + other)
        assert len(one) == len(other)
        assert set(read) == set(range(23))
        assert read.total() == 24, "there is one pad"
    assert len(set(map(str, shares[0]))) == 3
    for rank in ranks:
        for run in ("whole", "accumulated"):
            assert rank[run]["ours"]
            assert rank[run]["made by threads"]
        assert rank["whole"]["steps"] == 18
        assert rank["accumulated"]["steps"] == 9
        assert rank["accumulated"]["epochs"] == rank["whole"]["epochs"]


def test_predictions_are_each_samples_in_order_without_pads(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["whole"]["predicted"] == list(range(13))
        assert rank["whole"]["predicted by threads"]


def test_a_callback_that_keeps_the_loaders_state_makes_the_resume_exact(ranks: list[Any]) -> None:
    for rank in ranks:
        whole, resumed = rank["whole"], rank["resumed"]
        assert rank["killed"]
        assert resumed["epochs"] == [whole["epochs"][1][4:], whole["epochs"][2]]
        assert resumed["steps"] == whole["steps"]
        assert resumed["weights"] == whole["weights"]
        assert resumed["ours"]
        assert resumed["made by threads"]


def test_without_it_the_trainer_skips_to_the_same_samples_with_other_augmentation(ranks: list[Any]) -> None:
    """For the rest of that epoch it puts a loader of torch's around our sampler."""
    for rank in ranks:
        rest, last = rank["skipped"]["epochs"]
        whole = rank["whole"]["epochs"]
        assert indices([rest]) == indices([whole[1][4:]])
        assert rest != whole[1][4:]
        assert last == whole[2]
