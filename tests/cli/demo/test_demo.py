"""`headrace demo`: it runs, its claims hold, and one that did not would be said and would fail it."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.demo import demo, launch
from headrace.cli.terminal.screen import Screen

LIMIT_S = 500

TRAINING: list[dict[str, Any]] = [
    {"headrace": "data", "training": 10, "test": 5},
    {"headrace": "epoch", "epoch": 0, "loss": 1.0, "shares": [5, 5], "repeated": 0, "missing": 0, "order": "a"},
    {"headrace": "epoch", "epoch": 1, "loss": 0.5, "shares": [5, 5], "repeated": 0, "missing": 0, "order": "b"},
    {"headrace": "test", "correct": 5, "counted": 5, "distinct": 5},
    {"headrace": "test", "correct": 6, "counted": 6, "distinct": 5},
    {"headrace": "test", "correct": 5, "counted": 5, "distinct": 5},
    {"headrace": "balanced", "data": [1, 9], "first": [[2, 2], [2, 2]], "batches": 4, "spread": 0},
]
PACKED: list[dict[str, Any]] = [
    {"headrace": "packed", "shards": 2, "samples": 10},
    {"headrace": "memory", "begun": 0, "steps": 6, "digests": ["e", "f"], "weights": "0"},
]
SHARDS: dict[str, Any] = {"headrace": "shards", "begun": 3, "steps": 6, "digests": ["e", "f"], "weights": "0"}
RAY: dict[str, Any] = {"headrace": "ray", "steps": 9, "kill_step": 4, "died": 1, "here": "b", "there": "b"}
_DATA, _FIRST, SECOND, ALONE, SAMPLER, TEST, BALANCED = range(7)


def told(
    monkeypatch: pytest.MonkeyPatch,
    training: list[dict[str, Any]],
    digests: tuple[str, ...] = ("d", "d", "d"),
    shards: dict[str, Any] = SHARDS,
    **ray: Any,
) -> None:
    """Put facts in the place of running ranks."""

    def run_ranks(size: int, *tasks: str, seen: object, killed: bool = False) -> list[dict[str, Any]]:
        names = tuple(task.partition(":")[0] for task in tasks)
        if names == ("shards",):
            return [shards]
        fact = {"headrace": "digest", "batch_size": 6 // size, "steps": 2, "samples": 10, "digest": digests[size - 1]}
        two = ("train", "digest", "pack", "memory", "shards")
        assert (names, killed) == {1: (("digest", "ray"), False), 2: (two, True), 3: (("digest",), False)}[size]
        return {1: [fact, RAY | ray], 2: [*training, fact, *PACKED], 3: [fact]}[size]

    monkeypatch.setattr(demo, "run_ranks", run_ranks)


def run_demo() -> tuple[int, str]:
    screen = Screen()
    screen.width = 100
    with screen.capture() as captured:
        code = demo.run_demo(screen)
    return code, captured.get()


def test_true_facts_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, TRAINING)
    code, text = run_demo()
    assert code == 0
    assert text.count(": yes") == 10
    assert "NO" not in text
    assert "All 10 claims held." in text


@pytest.mark.parametrize(
    ("which", "change", "claim"),
    [
        (SECOND, {"repeated": 1}, "disjoint"),
        (SECOND, {"missing": 1}, "complete"),
        (SECOND, {"order": "a"}, "shuffled anew"),
        (TEST, {"correct": 4}, "at least 95%"),
        (TEST, {"counted": 6, "correct": 6}, "exactly once"),
        (TEST, {"distinct": 4}, "exactly once"),
        (TEST, {"counted": 0, "correct": 0}, "exactly once"),
        (ALONE, {"correct": 4}, "as one process does"),
        (SAMPLER, {"counted": 5, "correct": 5}, "counts 0 of the images twice"),
        (BALANCED, {"spread": 1}, "all digits equally often"),
    ],
)
def test_a_false_fact_fails(which: int, change: dict[str, Any], claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = copy.deepcopy(TRAINING)
    training[which].update(change)
    told(monkeypatch, training)
    code, text = run_demo()
    assert code == 1
    assert re.search(f"{claim}.*: NO", text)
    assert re.search(f"FAILED: .*{claim}", text)


def test_unequal_digests_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, TRAINING, ("d", "d", "e"))
    code, text = run_demo()
    assert code == 1
    assert "1, 2 and 3 ranks give equal digests: NO" in text


@pytest.mark.parametrize("change", [{"there": "c"}, {"died": 0}])
def test_other_bits_on_ray_or_no_death_fail(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, TRAINING, **change)
    code, text = run_demo()
    assert code == 1
    assert "not one bit is another: NO" in text


@pytest.mark.parametrize("change", [{"begun": 0}, {"steps": 5}, {"digests": ["e", "g"]}, {"weights": "1"}], ids=str)
def test_other_batches_from_shards_fail(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, TRAINING, shards=SHARDS | change)
    code, text = run_demo()
    assert code == 1
    assert "are those from memory, bit for bit: NO" in text


def test_failing_ranks_fail_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run_ranks(size: int, *arguments: str, seen: object, killed: bool = False) -> list[dict[str, Any]]:
        raise launch.JobFailed("rank 1: what went wrong")

    monkeypatch.setattr(demo, "run_ranks", run_ranks)
    code, _ = run_demo()
    assert code == 1
    assert "rank 1: what went wrong" in capsys.readouterr().err


def folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder))


@pytest.mark.slow
def test_a_failing_rank_is_heard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder_for_temporary_files(monkeypatch, tmp_path)
    with pytest.raises(launch.JobFailed, match="'many'"):
        launch.run_ranks(1, "many")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_rank_that_is_not_killed_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder_for_temporary_files(monkeypatch, tmp_path)
    with pytest.raises(launch.JobFailed):
        launch.run_ranks(1, "digest", killed=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ranks_that_take_too_long_are_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder_for_temporary_files(monkeypatch, tmp_path)
    monkeypatch.setattr(launch, "LIMIT_S", 0.2)
    with pytest.raises(launch.JobFailed, match="were not done after 0 s"):
        launch.run_ranks(1, "digest")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_real_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from headrace.cli import main; main()", "demo"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "100"},
    )
    text = done.stdout
    assert done.returncode == 0, text + done.stderr
    assert not done.stderr
    assert "All 10 claims held." in text
    assert ": NO" not in text
    assert text.count(" s  done: ") >= 4  # each wait is seen to go on
    counts = re.findall(r"(\d+) +(\d) +(\d+) +([\d.]+)%", text)
    assert [(images, twice) for images, twice, *_ in counts] == [("359", "0"), ("360", "1"), ("359", "0")]
    assert counts[0] == counts[2] != counts[1]
    for images, _, right, accuracy in counts:
        assert float(accuracy) == round(100 * int(right) / int(images), 2) >= 95
    epochs = re.findall(r"^ +(\d+) +(\d\.\d{4}) +719 +719 +0 +0", text, re.MULTILINE)
    assert [int(epoch) for epoch, _ in epochs] == list(range(8))
    losses = [float(loss) for _, loss in epochs]
    assert losses[-1] < losses[0] / 10
    assert len(re.findall(r"rank \d, batch 0(?: +2){10}", text)) == 2
    digests = re.findall(r"^ +(\d) +(\d+) +60 +2876 +([0-9a-f]{24})", text, re.MULTILINE)
    assert [(int(ranks), int(batch_size)) for ranks, batch_size, _ in digests] == [(1, 48), (2, 24), (3, 16)]
    assert len({digest for _, _, digest in digests}) == 1
    trained = re.findall(r"^ +(memory|shards) +60 +(.*)$", text, re.MULTILINE)
    assert [name for name, _ in trained] == ["memory", "shards"]
    assert trained[0][1] == trained[1][1]
    assert "starts again from step 40" in " ".join(text.split())
    assert re.search(r"^ +on Ray +60 +[1-9]", text, re.MULTILINE)
    assert not list(tmp_path.iterdir()), "temporary files left behind"


def test_facts_are_told_as_marked_lines(capsys: pytest.CaptureFixture[str]) -> None:
    launch.tell("data", training=3)
    assert capsys.readouterr().out == '{"headrace": "data", "training": 3}\n'
