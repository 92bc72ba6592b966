"""Balanced: equal counts of each class in every batch of every rank, wherever the epoch is taken up."""

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan import Balanced, Plan
from headrace.plan.permute import SMALL
from headrace.types import World
from late import Late

stats = Late("scipy.stats")

UNLIKELY = 1e-4
SEEDS = st.integers(0, 2**64 - 1)


def labels_of(sizes: list[int]) -> np.ndarray:
    """Labels 0..K-1, class c occurring sizes[c] times, in a mixed order."""
    return np.random.default_rng(len(sizes)).permutation(np.repeat(np.arange(len(sizes)), sizes))


def world_of(order: Balanced, length: int, batch_size: int, size: int, **options: Any) -> list[Plan]:
    return [Plan(order, length, batch_size, World(rank, size), **options) for rank in range(size)]


def occurrences(
    order: Balanced, labels: np.ndarray, label: int, count: int, *, seed: int = 0, epoch: int = 0
) -> list[int]:
    """The dataset indices of one class, in the order in which the epoch's first `count` positions read them."""
    read = order.epoch(seed, epoch, len(labels))(np.arange(count))
    return read[labels[read] == label].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_counts_differ_by_at_most_one(size: int) -> None:
    """For 1-12 classes and batches of 1-8 and multiples of the classes, sharing factors or not; exactly."""
    for classes in range(1, 13):
        labels = labels_of([1 + 7 * (label % 3) for label in range(classes)])
        order = Balanced(labels, length=400)
        for batch_size in {*range(1, 9), classes, 2 * classes}:
            for cursor in (0, 1, 7, 400 - 3 * size * batch_size):
                plans = world_of(order, len(labels), batch_size, size, seed=classes)
                for step in range(min(3, plans[0].steps(0, cursor))):
                    whole = np.zeros(classes, np.int64)
                    for plan in plans:
                        counts = np.bincount(labels[plan.batch(0, step, cursor)], minlength=classes)
                        assert counts.sum() == batch_size
                        assert np.ptp(counts) <= (batch_size % classes != 0)
                        whole += counts
                    assert np.ptp(whole) <= (size * batch_size % classes != 0)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=12),
    st.integers(1, 6),
    st.integers(1, 8),
    SEEDS,
    st.sampled_from(["pad", "drop", "exact"]),
    st.data(),
)
def test_every_batch_is_balanced_from_any_cursor(
    sizes: list[int], size: int, batch_size: int, seed: int, tail: Any, data: st.DataObject
) -> None:
    """The last and partial ones too; and the ranks together read each position once."""
    labels = labels_of(sizes)
    order = Balanced(labels, length=data.draw(st.integers(1, 150)))
    plans = world_of(order, len(labels), batch_size, size, seed=seed, tail=tail)
    cursor = data.draw(st.integers(0, plans[0].samples))
    read: list[int] = []
    for plan in plans:
        for step in range(plan.steps(0, cursor)):
            read += plan.positions(2, step, cursor).tolist()
            assert np.ptp(np.bincount(labels[plan.batch(2, step, cursor)], minlength=len(sizes))) <= 1
    assert sorted(read) == list(range(cursor, plans[0].end(0, cursor)))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), SEEDS, st.integers(0, 100))
def test_a_global_batch_does_not_depend_on_the_world(sizes: list[int], seed: int, cursor: int) -> None:
    labels = labels_of(sizes)
    order = Balanced(labels, length=150)
    read: dict[int, list[Counter[int]]] = {}
    for size in (1, 2, 3, 4, 6, 12):
        plans = world_of(order, len(labels), 12 // size, size, seed=seed, tail="exact")
        read[size] = [Counter() for _ in range(max(plan.steps(0, cursor) for plan in plans))]
        for plan in plans:
            for step in range(plan.steps(0, cursor)):
                read[size][step].update(plan.batch(1, step, cursor).tolist())
    assert all(batches == read[1] for batches in read.values())
    everything = order.epoch(seed, 1, len(labels))(np.arange(cursor, 150)).tolist()
    assert sum(read[1], Counter()) == Counter(everything)


def test_rare_classes_are_read_in_passes_each_in_a_new_order() -> None:
    labels = labels_of([12, 500, 1])
    order = Balanced(labels)
    rare = occurrences(order, labels, 0, 513)
    passes = [tuple(rare[start : start + 12]) for start in range(0, len(rare) - 11, 12)]
    assert len(passes) == 14
    members = np.flatnonzero(labels == 0).tolist()
    assert all(sorted(one) == members for one in passes), "each pass has every member once"
    assert len(set(passes)) == len(passes), "no two passes alike"
    again = occurrences(order, labels, 0, 513, epoch=1)
    assert len({*passes, *(tuple(again[start : start + 12]) for start in range(0, 157, 12))}) == 28
    assert set(occurrences(order, labels, 2, 513)) == set(np.flatnonzero(labels == 2))
    assert len(occurrences(order, labels, 2, 513)) == 171


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), SEEDS, st.integers(0, 3))
def test_no_member_repeats_before_all_others_were_read(sizes: list[int], seed: int, epoch: int) -> None:
    """So a class with members enough has no repeat in the whole epoch."""
    labels = labels_of(sizes)
    order = Balanced(labels)
    for label, members in enumerate(sizes):
        drawn = occurrences(order, labels, label, len(labels), seed=seed, epoch=epoch)
        assert len(drawn) in (len(labels) // len(sizes), -(-len(labels) // len(sizes)))
        for start in range(0, len(drawn), members):
            one_pass = drawn[start : start + members]
            assert len(set(one_pass)) == len(one_pass)


def test_what_is_read_of_a_frequent_class_changes_evenly() -> None:
    labels = labels_of([40, 10, 10, 10])
    order = Balanced(labels, length=40)
    drawn = [occurrences(order, labels, 0, 40, epoch=epoch) for epoch in range(1000)]
    assert {len(one) for one in drawn} == {10}
    read = np.bincount(np.ravel(drawn), minlength=len(labels))[labels == 0]
    assert stats.chisquare(read).pvalue > UNLIKELY
    firsts = np.bincount([one[0] for one in drawn], minlength=len(labels))[labels == 0]
    assert stats.chisquare(firsts).pvalue > UNLIKELY


def test_passes_are_unrelated() -> None:
    """One after another, and those of different classes at the same time."""
    labels = labels_of([7, 7])
    length = 2 * 7 * 3000
    order = Balanced(labels, length=length)
    places, other = (
        np.argsort(np.reshape(occurrences(order, labels, label, length), (3000, 7)), axis=1) for label in (0, 1)
    )
    for one, two in [(places[:-1, 2], places[1:, 2]), (places[:, 2], other[:, 2]), (places[:-1, 0], other[1:, 6])]:
        assert stats.chisquare(np.bincount(one * 7 + two, minlength=49)).pvalue > UNLIKELY
    within = np.bincount(places[:, 0] * 7 + places[:, 1], minlength=49)[~np.eye(7, dtype=bool).ravel()]
    assert stats.chisquare(within).pvalue > UNLIKELY


@pytest.mark.parametrize(
    ("classes", "size", "batch_size"), [(2, 2, 1), (3, 2, 1), (3, 4, 2), (4, 2, 2), (5, 3, 3), (6, 4, 4)]
)
def test_no_rank_is_starved_of_a_class(classes: int, size: int, batch_size: int) -> None:
    """What a batch cannot share out evenly falls to each rank in turn of chance."""
    labels = labels_of([50] * classes)
    steps = 1200
    order = Balanced(labels, length=steps * size * batch_size)
    for plan in world_of(order, len(labels), batch_size, size, seed=1):
        read = [plan.batch(0, step) for step in range(steps)]
        counts = np.bincount(labels[np.concatenate(read)], minlength=classes)
        assert np.abs(counts / counts.mean() - 1).max() < 0.1
        first = np.bincount(labels[np.concatenate(read[:60])], minlength=classes)
        assert first.min() > 0


@pytest.mark.slow
def test_beyond_two_to_the_24() -> None:
    """Also classes too large for a table: no repeats, and every member can be read."""
    labels = np.zeros(2**24 + 1, np.int8)
    labels[::1000] = 1
    labels[-5:] = 2
    order = Balanced(labels)
    plans = world_of(order, len(labels), 30, 4, seed=3)
    for step in (0, 1, 100_000, plans[0].steps(0) - 2):
        for plan in plans:
            assert np.bincount(labels[plan.batch(0, step)]).tolist() == [10, 10, 10]
    read = order.epoch(0, 0, len(labels))(np.arange(60_000))
    frequent = read[labels[read] == 0]
    assert len(np.unique(frequent)) == len(frequent) == 20_000
    assert stats.chisquare(np.bincount(frequent * 64 // len(labels), minlength=64)).pvalue > UNLIKELY
    assert np.bincount(read[labels[read] == 2] - (2**24 - 4)).tolist() == [4000] * 5


def test_a_class_too_large_for_a_table_is_read_once_per_pass() -> None:
    labels = np.repeat([0, 1], [SMALL + 1, 3000])
    order = Balanced(labels, length=4 * (SMALL + 1))
    drawn = occurrences(order, labels, 0, 4 * (SMALL + 1))
    first, second = drawn[: SMALL + 1], drawn[SMALL + 1 :]
    assert sorted(first) == sorted(second) == list(range(SMALL + 1))
    assert first != second


def test_forgetting_a_pass_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = labels_of([9, 5, 30])
    positions = np.random.default_rng(0).permutation(300)
    expected = Balanced(labels).epoch(1, 2, 44)(positions)
    monkeypatch.setattr("headrace.plan.balanced._CACHED_ENTRIES", 12)
    order = Balanced(labels).epoch(1, 2, 44)
    np.testing.assert_array_equal(order(positions), expected)
    single = np.concatenate([order(positions[place : place + 1]) for place in range(300)])
    np.testing.assert_array_equal(single, expected)
    assert order(np.empty(0, np.int64)).tolist() == []


@pytest.mark.parametrize(
    "labels",
    [
        [7, -2, 7, 9, 9, 7],
        (7, -2, 7, 9, 9, 7),
        np.array([7, -2, 7, 9, 9, 7], np.int8),
        torch.tensor([7, -2, 7, 9, 9, 7]),
        [0.7, 0.2, 0.7, 0.9, 0.9, 0.7],
        ["dog", "ant", "dog", "eel", "eel", "dog"],
        np.array(["dog", "ant", "dog", "eel", "eel", "dog"], object),
    ],
    ids=lambda labels: f"{type(labels).__name__}-{labels[0]}",
)
def test_labels_of_every_kind(labels: Any) -> None:
    order = Balanced(labels)
    assert order.random
    assert order.samples(6) == 6
    assert len(order.classes) == 3
    plain = Balanced([1, 0, 1, 2, 2, 1])
    assert order.epoch(0, 0, 6)(np.arange(60)).tolist() == plain.epoch(0, 0, 6)(np.arange(60)).tolist()


def test_epochs_and_seeds_differ_and_it_travels() -> None:
    labels = labels_of([20, 20])
    order = Balanced(labels)
    runs = {tuple(order.epoch(*words, 40)(np.arange(40)).tolist()) for words in [(0, 0), (0, 1), (1, 0), (2**32, 0)]}
    assert len(runs) == 4
    copy = pickle.loads(pickle.dumps(order))
    assert copy.epoch(0, 0, 40)(np.arange(40)).tolist() == order.epoch(0, 0, 40)(np.arange(40)).tolist()


def test_the_length_of_an_epoch() -> None:
    assert Balanced([0, 1, 1]).samples(3) == 3
    assert Balanced([0, 1, 1], length=1).samples(3) == 1
    assert Plan(Balanced([0, 1, 1], length=10**12), 3, 2).batch(0, 10**11).tolist() in ([0, 1], [0, 2], [1, 0], [2, 0])


@pytest.mark.parametrize(
    ("labels", "error", "text"),
    [
        ([], ValueError, "labels is empty: expected a non-empty sequence, one label a sample"),
        ([[0, 1], [1, 0]], ValueError, r"labels of shape \(2, 2\) is not allowed.*one dimension"),
        (3, TypeError, "labels=3 is not allowed: expected a non-empty sequence.*got int"),
        ([0.0, float("nan"), 1.0], ValueError, r"labels\[1\]='nan' is not allowed.*Subset"),
        (torch.tensor([float("nan")]), ValueError, r"labels\[0\]='nan'"),
        ([0, None], TypeError, "not supported"),
    ],
)
def test_labels_errors(labels: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Balanced(labels)


@pytest.mark.parametrize(
    "labels",
    [np.array([0.0, float("nan")], object), np.array(["2024-05-01", "NaT"], "M8[D]"), np.array([0, complex("nan")])],
    ids=["object", "datetime", "complex"],
)
def test_missing_labels_of_other_kinds_are_refused_too(labels: np.ndarray) -> None:
    """A missing label would become a class of its own, read as often as a real one."""
    with pytest.raises(ValueError, match=r"labels\[1\]"):
        Balanced(labels)


@pytest.mark.parametrize(
    ("length", "error", "text"),
    [
        (0, ValueError, "length=0 is not allowed: expected an integer >= 1. Leave it out for one sample per label"),
        (-1, ValueError, "length=-1 is not allowed"),
        (1.5, TypeError, r"length=1\.5 is not allowed.*got float"),
        (True, TypeError, "length=True is not allowed.*got bool"),
    ],
)
def test_length_errors(length: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Balanced([0, 1], length=length)


@pytest.mark.parametrize("length", [1, 4])
def test_labels_of_another_dataset(length: int) -> None:
    text = rf"len\(labels\)=3 is not allowed: expected one label per sample, len\(dataset\)={length}\. Compute"
    with pytest.raises(ValueError, match=text):
        Plan(Balanced([0, 1, 1], length=2), length)


def test_the_stream_is_frozen() -> None:
    """Another order or deal would change what users who resume a run read."""
    labels = [0, 1, 2, 2, 1, 2, 2, 2, 0, 2]
    assert Balanced(labels).epoch(1, 2, 10)(np.arange(12)).tolist() == [1, 8, 3, 4, 0, 9, 1, 0, 5, 4, 8, 2]
    plans = world_of(Balanced([0, 1, 2, 3, 4] * 4, length=100), 20, 4, 3, seed=7)
    assert [plan.positions(3, 5).tolist() for plan in plans] == [[64, 65, 66, 67], [63, 69, 70, 71], [60, 61, 62, 68]]
    assert [plan.positions(3, 5, 1).tolist() for plan in plans] == [
        [63, 70, 71, 72],
        [61, 62, 64, 68],
        [65, 66, 67, 69],
    ]
    assert [plan.batch(3, 5).tolist() for plan in plans] == [[4, 18, 5, 2], [16, 19, 8, 0], [13, 10, 17, 6]]
