"""What ranks are found to disagree on, and how the text says so."""

from typing import Any

import pytest

from headrace.errors import StateMismatch
from headrace.loader.agreement import compare, facts_of_all_ranks, verify

SAME: dict[str, Any] = {
    "dataset_length": 50_000,
    "seed": 7,
    "epoch": 2,
    "samples": 640,
    "steps": 100,
    "order": "Shuffled",
    "batch_size": 32,
    "tail": "pad",
    "mode": "plan",
}


def ranks(count: int, **changed: dict[int, Any]) -> list[dict[str, Any]]:
    """Facts that agree but for what is changed: name = {rank: value}."""
    facts = [SAME | {"rank": rank, "world_size": count} for rank in range(count)]
    for name, values in changed.items():
        for rank, value in values.items():
            facts[rank][name] = value
    return facts


def text_of(facts: list[dict[str, Any]]) -> list[str]:
    with pytest.raises(StateMismatch) as raised:
        compare(facts)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_ranks_that_agree(count: int) -> None:
    compare(ranks(count))


def test_the_example_of_the_table() -> None:
    lines = text_of(ranks(6, dataset_length={3: 49_999}, epoch={0: 0, 1: 1}))
    assert lines[:3] == [
        "ranks disagree:",
        "  dataset_length   ranks 0-2, 4-5: 50000   rank 3: 49999",
        "  epoch            ranks 2-5: 2            rank 0: 0       rank 1: 1",
    ]
    assert len(lines) == 4
    assert "same files" in lines[3]


@pytest.mark.parametrize("name", sorted(SAME))
def test_each_fact_in_turn(name: str) -> None:
    lines = text_of(ranks(4, **{name: {2: "other"}}))
    assert lines[1] == f"  {name}   ranks 0-1, 3: {SAME[name]}   rank 2: other"
    assert len(lines) == 3


def test_steps_may_differ_where_the_tail_is_exact() -> None:
    exact = dict.fromkeys(range(3), "exact")
    compare(ranks(3, tail=exact, steps={2: 99}))
    assert "steps" in text_of(ranks(3, tail=exact | {2: "pad"}, steps={2: 99}))[2]


def test_a_share_that_nobody_reads_and_one_read_twice() -> None:
    lines = text_of(ranks(4, rank={2: 1}))
    assert lines[1] == "  rank   ranks 1-2: share 1 of 4   no rank: share 2 of 4"
    assert "World(rank, size)" in lines[2]


def test_several_ranks_may_read_each_share() -> None:
    both = dict.fromkeys(range(4), 2)
    compare(ranks(4, rank={0: 0, 1: 0, 2: 1, 3: 1}, world_size=both))
    assert text_of(ranks(4, rank={0: 0, 1: 0, 2: 1, 3: 0}, world_size=both))[1].startswith("  rank   ranks 0-1, 3:")
    compare(ranks(3, rank=dict.fromkeys(range(3), 0), world_size=dict.fromkeys(range(3), 1)))


def test_a_world_without_a_group_is_not_taken_for_agreement() -> None:
    lines = text_of([SAME | {"rank": 2, "world_size": 4}])
    assert lines[1] == "  rank   no rank: share 0 of 4   no rank: share 1 of 4   no rank: share 3 of 4"
    assert "init_process_group" in lines[2]


def test_other_worlds_on_other_ranks() -> None:
    lines = text_of(ranks(4, world_size={3: 1}, rank={3: 0}))
    assert lines[1] == "  world_size   ranks 0-2: 4   rank 3: 1"
    assert len(lines) == 3, "shares of different worlds are not counted"


def test_a_rank_that_raised() -> None:
    facts: list[Any] = ranks(3, epoch={0: 1})
    facts[1] = {"error": "ValueError: empty"}
    lines = text_of(facts)
    assert lines[1] == "  error   rank 1: ValueError: empty   ranks 0, 2: none"
    assert lines[2].split() == ["epoch", "rank", "0:", "1", "rank", "2:", "2"]
    assert "wait" in lines[3]
    assert text_of([{"error": "a"}, {"error": "a"}])[1] == "  error   ranks 0-1: a"


def test_what_one_rank_knows_and_another_does_not() -> None:
    facts = ranks(2)
    del facts[1]["steps"]
    assert text_of(facts)[1] == "  steps   rank 0: 100   rank 1: -"


def test_a_thousand_ranks_stay_readable() -> None:
    lines = text_of(ranks(1000, samples={rank: rank for rank in range(0, 1000, 3)}, seed={500: 1}))
    assert all(len(line) < 300 for line in lines)
    assert lines[1].startswith("  seed      ranks 0-499, 501-999: 7")
    assert "330 other values" in lines[2]
    assert "... 998 (666 in all): 640" in lines[2]


def test_without_a_group_there_is_one_rank() -> None:
    assert facts_of_all_ranks({"epoch": 3}) == [{"epoch": 3}]


def test_what_a_rank_raises_is_the_cause() -> None:
    def collect() -> Any:
        raise OSError("no such folder")

    with pytest.raises(StateMismatch, match=r"rank 0: OSError: no such folder") as raised:
        verify(collect)
    assert isinstance(raised.value.__cause__, OSError)
