"""Hugging Face's datasets, torchdata and PyTorch Geometric on two ranks: shares, shuffling, resuming."""

from pathlib import Path
from typing import Any

import pytest

from launch import run_ranks

pytestmark = pytest.mark.slow

STREAMS = ("dealt", "split")
OURS = ("table", "transformed", "graphs", "nodes_above", *STREAMS)


def test_datasets_torchdata_and_geometric(tmp_path: Path) -> None:
    """One test of all: its ranks run once, wherever tests are dealt to several processes."""
    ranks = run_ranks(Path(__file__).parent / "jobs" / "collections_read.py", 2, tmp_path)
    for kind in OURS:
        check_shares(kind, [rank[kind]["epochs"] for rank in ranks], 24 if kind in STREAMS else 23)
    for rank in ranks:
        for kind in (*OURS, "stateful"):
            check_resumed(kind, rank[kind])
        # What reads a table does not matter.
        tables = [rank[kind]["epochs"] for kind in OURS if kind not in STREAMS]
        assert tables == [tables[0]] * 4
        # torchdata's loader repeats the epoch, since nobody tells its sampler of the next.
        assert rank["stateful"]["epochs"] == [rank["stateful"]["epochs"][0]] * 3
        check_graphs(*rank["a batch of graphs"])
        assert rank["noise"] == [True, 12], "a table's transform draws the same in every run"


def check_shares(kind: str, ranks: list[Any], samples: int) -> None:
    """The ranks share each epoch, one pad aside, and each is shuffled anew."""
    epochs = list(zip(*ranks, strict=True))
    for one, other in epochs:
        assert len(one) == len(other) == 12, kind
        assert set(one + other) == set(range(samples)), kind
    assert len(set(map(str, epochs))) == 3, kind


def check_resumed(kind: str, found: dict[str, Any]) -> None:
    """Another loader goes on where the first was, in the middle of its second epoch, and both into the third."""
    assert len(found["begun"]) == 4, kind
    assert found["begun"] + found["going on"] == found["epochs"][1] + found["epochs"][2], kind
    assert found["resumed"] == found["going on"], kind


def check_graphs(kind: str, of_graph: list[int], nodes: list[int], numbers: list[int]) -> None:
    assert kind == "DataBatch"
    assert of_graph == [graph for graph, number in enumerate(numbers) for _ in range(1 + number % 3)]
    assert nodes == [number for number in numbers for _ in range(1 + number % 3)]
