"""`headrace plan`: what it prints is what the plan says, and what it counts is what the ranks read."""

import json
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from headrace import Plan, Sequential, Shuffled, World
from headrace.cli.app import app


def run(*options: object, code: int = 0, width: int = 100) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, options)], env={"COLUMNS": str(width)})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def as_json(*options: object) -> Any:
    return json.loads(run(*options, "--json"))


def test_json_of_the_smallest_example() -> None:
    assert as_json("--size", 3, "--world-size", 2, "--batch-size", 1) == {
        "size": 3,
        "world_size": 2,
        "batch_size": 1,
        "tail": "pad",
        "shuffle": False,
        "epoch": 0,
        "seed": 0,
        "cursor": 0,
        "steps": [2, 2],
        "ranks": [
            {
                "rank": 0,
                "steps": [
                    {"samples": [0], "positions": [0], "pads": []},
                    {"samples": [2], "positions": [2], "pads": []},
                ],
            },
            {
                "rank": 1,
                "steps": [
                    {"samples": [1], "positions": [1], "pads": []},
                    {"samples": [0], "positions": [3], "pads": [3]},
                ],
            },
        ],
        "coverage": {"once": 2, "more": {"0": 2}, "never": []},
    }


@pytest.mark.parametrize(
    ("tail", "ranks", "coverage"),
    [
        (
            "pad",
            [[[0, 4], [8]], [[1, 5], [9]], [[2, 6], [10]], [[3, 7], [0]]],
            {"once": 10, "more": {"0": 2}, "never": []},
        ),
        ("drop", [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]], {"once": 8, "more": {}, "never": [8, 9, 10]}),
        ("exact", [[[0, 4], [8]], [[1, 5], [9]], [[2, 6], [10]], [[3, 7]]], {"once": 11, "more": {}, "never": []}),
    ],
)
def test_tails(tail: str, ranks: list[Any], coverage: dict[str, Any]) -> None:
    shown = as_json("--size", 11, "--world-size", 4, "--batch-size", 2, "--tail", tail)
    assert [[step["samples"] for step in rank["steps"]] for rank in shown["ranks"]] == ranks
    assert shown["steps"] == [len(rank) for rank in ranks]
    assert shown["coverage"] == coverage


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cursor", [0, 17])
def test_json_is_what_each_rank_reads(shuffle: bool, cursor: int) -> None:
    options = ["--size", 103, "--world-size", 3, "--batch-size", 4, "--seed", 5, "--epoch", 2, "--cursor", cursor]
    shown = as_json(*options, *(["--shuffle"] if shuffle else []))
    for rank in range(3):
        plan = Plan(Shuffled() if shuffle else Sequential(), 103, 4, World(rank, 3), seed=5)
        steps = range(plan.steps(0, cursor))
        theirs = shown["ranks"][rank]["steps"]
        assert [step["samples"] for step in theirs] == [plan.batch(2, step, cursor).tolist() for step in steps]
        assert [step["positions"] for step in theirs] == [plan.positions(2, step, cursor).tolist() for step in steps]


def test_what_was_read_before_the_cursor_counts_as_read() -> None:
    shown = as_json("--size", 11, "--world-size", 4, "--tail", "exact", "--cursor", 5, "--shuffle")
    assert sum(len(step["samples"]) for rank in shown["ranks"] for step in rank["steps"]) == 6
    assert shown["coverage"] == {"once": 11, "more": {}, "never": []}


def test_a_world_larger_than_the_dataset() -> None:
    shown = as_json("--size", 3, "--world-size", 8, "--batch-size", 4)
    assert shown["coverage"] == {"once": 0, "more": {"0": 3, "1": 3, "2": 2}, "never": []}
    assert as_json("--size", 3, "--world-size", 8, "--tail", "drop")["coverage"]["never"] == [0, 1, 2]


def test_table_marks_pads_and_sums_up() -> None:
    text = run("--size", 3, "--world-size", 2, "--batch-size", 1)
    lines = text.splitlines()
    assert lines[0].startswith("3 samples, 2 ranks x 1: each sample at least once, 1 pad")
    assert [line.split() for line in lines if "│" in line] == [
        ["│", "0", "│", "0", "│", "1", "│"],
        ["│", "1", "│", "2", "│", "0*", "│"],
    ]
    assert "read once:  2 samples\nread again: sample 0 (2 times in all)\nnever read: none\n" in text


def test_table_of_uneven_ranks_and_of_dropped_samples() -> None:
    assert "│    1 │ 2      │ -      │" in run("--size", 3, "--world-size", 2, "--tail", "exact")
    text = run("--size", 11, "--world-size", 4, "--batch-size", 2, "--tail", "drop")
    assert "8 read, 3 never, no pads (tail=drop, 1 step)" in text
    assert "never read: sample 8; sample 9; sample 10\n" in text


def test_an_epoch_without_a_step_has_no_table() -> None:
    assert "│" not in run("--size", 3, "--world-size", 8, "--tail", "drop")


def test_long_epochs_show_their_ends_and_json_is_complete() -> None:
    text = run("--size", 100_000, "--world-size", 16, "--batch-size", 32, "--shuffle")
    rows = [line.split("│")[1].strip() for line in text.splitlines() if "│" in line]
    assert [row for row in rows if row] == [*map(str, range(8)), "184", "left out", "192", "193", "194", "195"]
    assert "rank 3 " in text
    assert "rank 4 " not in text
    assert "rank 15" in text
    shown = as_json("--size", 100_000, "--world-size", 16, "--batch-size", 32, "--shuffle")
    read = [sample for rank in shown["ranks"] for step in rank["steps"] for sample in step["samples"]]
    assert np.array_equal(np.sort(read), np.arange(100_000))


def test_a_table_keeps_to_the_width() -> None:
    for width in (60, 80, 140):
        text = run("--size", 10_000, "--world-size", 8, "--batch-size", 32, width=width)
        assert max(len(line) for line in text.splitlines() if "│" in line) <= width


def test_epochs_too_long_to_count_are_shown_all_the_same() -> None:
    text = run("--size", 10**12, "--world-size", 4, "--batch-size", 256, "--shuffle")
    assert text.startswith("1,000,000,000,000 samples, 4 ranks x 256: no pads (tail=pad, 976,562,500 steps)\n")
    assert "976562499" in text
    assert "not counted" in text
    assert "Leave out --json" in run("--size", 10**12, "--json", code=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--size", 0], "--size=0 is not allowed: expected an integer in [1, "),
        (["--size", 3, "--world-size", 0], "--world-size=0 is not allowed"),
        (
            ["--size", 3, "--world-size", 99999999],
            "--world-size=99999999 is not allowed: expected an integer in [1, 100000]",
        ),
        (["--size", 3, "--batch-size", 0], "--batch-size=0 is not allowed"),
        (["--size", 3, "--tail", "cut"], "tail='cut' is not allowed: expected one of ('pad', 'drop', 'exact')"),
        (["--size", 3, "--epoch", -1], "--epoch=-1 is not allowed"),
        (
            ["--size", 2**70],
            "is not allowed: expected an integer in [1, 1000000000000000]. Count the dataset's samples",
        ),
        (
            ["--size", 10**12, "--batch-size", 10**9],
            "--batch-size=1000000000 is not allowed: expected an integer in [1, ",
        ),
        (["--size", 3, "--shuffle", "--epoch", 2**70], "is not allowed: expected an integer in [0, "),
        (["--shards", "*.tar", "--seed", 2**70], "is not allowed: expected an integer in [0, "),
        (
            ["--shards", "*.tar", "--streams", 10**9],
            "--streams=1000000000 is not allowed: expected an integer in [1, 1",
        ),
        (["--size", 3, "--seed", -1], "seed=-1 is not allowed"),
        (["--size", 3, "--cursor", 4], "cursor=4 is not allowed: expected an integer in [0, 3]"),
    ],
)
def test_wrong_options_say_what_is_allowed(options: list[Any], text: str) -> None:
    said = run(*options, code=2)
    assert text in said
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1
