"""`headrace plan --shards` says which shards ranks read and how labels mix; the figures are those of brute force."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from commands import run_command
from headrace.cli.mixing import locality, mixture
from headrace.plan.blocks import Blocks
from headrace.shards.scanning import scan
from shards.test_index import write


@pytest.mark.parametrize(("streams", "world"), [(12, 4), (12, 5), (4, 8), (1, 3)])
def test_the_shards_of_ranks_are_those_that_they_read(streams: int, world: int) -> None:
    order = Blocks([30] * 40, streams, 64)
    read = order.epoch(7, 0, 1200)(np.arange(1200)) // 30
    expected = [np.unique(read[rank::world]) for rank in range(world)]
    found = locality(order, 7, world)
    assert found.shards.tolist() == [len(one) for one in expected]
    assert found.shared == (np.bincount(np.concatenate(expected)) > 1).sum()


def test_labels_that_come_in_runs_are_seen() -> None:
    labels = np.repeat(np.arange(40), 30)
    mixed = mixture(Blocks([30] * 40, 4, 256), labels, 0, 1, 32)
    in_runs = mixture(Blocks([30] * 40, 1, 1), labels, 0, 1, 32)
    assert in_runs.correlation > 0.9
    assert in_runs.distinct < 4
    assert mixed.correlation < in_runs.correlation / 4
    assert mixed.distinct > 4 * in_runs.distinct
    draw = np.random.default_rng(0)
    drawn = [len(np.unique(draw.choice(labels, 32, replace=False))) for _ in range(2000)]
    assert mixed.expected == pytest.approx(np.mean(drawn), rel=0.01)
    assert mixture(Blocks([30] * 40), np.zeros(1200), 0, 1, 32).correlation == 0


run = partial(run_command, "plan")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        path = write(tmp_path / f"{number}.tar", [(f"{one}", {"cls": b"%d" % number}) for one in range(20)])
        scan(path, values=["cls"]).save(Path(f"{path}.index"))
    arguments = "--shards", f"{tmp_path}/*.tar", "--world-size", "2", "--batch-size", "8", "--label", "cls"
    assert run(*arguments, "--streams", "4", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "8 shards, 160 samples, 4 streams, window 2048" in said
    assert "2 ranks read 4 to 4 shards each" in said
    assert "a batch of 8 has " in said
    assert run(*arguments, "--streams", "3", monkeypatch=monkeypatch) == 0
    assert "3 streams cannot be dealt equally to 2 ranks. With --streams 192" in capsys.readouterr().out
    for wrong, text in (
        (["--label", "jpg"], "field='jpg' is not allowed"),
        (["--batch-size", "100"], "--batch-size=100 is not allowed"),
        (["--streams", "0"], "streams=0 is not allowed"),
    ):
        assert run(*arguments, *wrong, monkeypatch=monkeypatch) == 2
        assert text in capsys.readouterr().err
    assert run(monkeypatch=monkeypatch) == 2
    assert "--size or --shards is missing" in capsys.readouterr().err
