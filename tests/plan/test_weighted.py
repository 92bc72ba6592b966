"""Weighted: draws in proportion, never an impossible one, and the same for every world."""

import pickle
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan import Plan, Weighted
from headrace.types import World
from late import Late

stats = Late("scipy.stats")

UNLIKELY = 1e-4


def draws(order: Weighted, length: int, count: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return order.epoch(seed, epoch, length)(np.arange(count))


@pytest.mark.parametrize(
    "weights",
    [
        [1],
        [1, 1],
        [3, 1],
        [0.1, 0.2, 0.3, 0.4],
        [1, 2, 3, 4, 5, 6, 7],
        [10, 0.5, 10, 0.5],
        [1e-300, 2e-300, 5e-300],
        [1e307, 2e307, 3e307],
        list(np.arange(1, 31) ** 2),
    ],
    ids=str,
)
def test_draws_are_in_proportion(weights: list[float]) -> None:
    """However the weights are scaled, over positions of one epoch as over epochs and seeds."""
    share = np.array(weights) / np.sum(weights)
    order = Weighted(weights)
    one_epoch = draws(order, len(weights), 40_000)
    over_epochs = np.concatenate([draws(order, len(weights), 8, epoch=epoch) for epoch in range(1000)])
    over_seeds = np.concatenate([draws(order, len(weights), 8, seed=seed) for seed in range(1000)])
    for drawn in (one_epoch, over_epochs, over_seeds):
        assert drawn.dtype == np.int64
        counts = np.bincount(drawn, minlength=len(weights))
        assert len(counts) == len(weights)
        assert len(weights) == 1 or stats.chisquare(counts, share * len(drawn)).pvalue > UNLIKELY


def test_draws_are_independent_of_each_other() -> None:
    share = np.array([0.1, 0.2, 0.3, 0.4])
    drawn = draws(Weighted(share), 4, 40_001)
    for apart in (1, 2, 7):
        pairs = np.bincount(drawn[:-apart] * 4 + drawn[apart:], minlength=16)
        assert stats.chisquare(pairs, np.outer(share, share).ravel() * pairs.sum()).pvalue > UNLIKELY
    following = draws(Weighted(share), 4, 40_001, epoch=1)
    pairs = np.bincount(drawn * 4 + following, minlength=16)
    assert stats.chisquare(pairs, np.outer(share, share).ravel() * pairs.sum()).pvalue > UNLIKELY


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 5e-324, 1e-300, 1e-9, 1.0, 3.0, 1e9, 1e300]), min_size=1, max_size=40),
    st.integers(0, 2**64 - 1),
)
def test_items_of_weight_zero_are_never_drawn(weights: list[float], seed: int) -> None:
    if not any(weights):
        with pytest.raises(ValueError, match="all zero"):
            Weighted(weights)
        return
    drawn = draws(Weighted(weights), len(weights), 300, seed=seed)
    assert drawn.min() >= 0
    assert drawn.max() < len(weights)
    assert (np.array(weights)[drawn] > 0).all()


@pytest.mark.parametrize(
    "weights",
    [
        [0, 0, 1, 0, 1, 0, 0],
        [0, 5e-324, 0],
        [0, 1e300, 0, 1e-300, 0],
        [0, 1e-300, 0, 1e300, 0],
        [0, 0.1, 0.2, 0.3, 0],
        [0, 1.7e308, 0],
    ],
    ids=str,
)
def test_not_even_at_the_ends_of_the_interval(weights: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = np.array([0.0, 2.0**-53, 0.25, 0.5, 0.75, 1 - 2.0**-53])
    monkeypatch.setattr("headrace.plan.weighted.uniforms", lambda _, positions: uniform[positions])
    assert (np.array(weights)[draws(Weighted(weights), len(weights), len(uniform))] > 0).all()


def test_a_uniform_selects_by_cumulative_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.plan.weighted.uniforms", lambda _, positions: positions / 8)
    assert draws(Weighted([1, 0, 2, 1, 4]), 5, 8).tolist() == [0, 2, 2, 3, 4, 4, 4, 4]


@pytest.mark.slow
def test_beyond_two_to_the_24() -> None:
    """Where `torch.multinomial` stops: every item can be drawn, and heavy ones as often as they weigh."""
    n = 2**24 + 1
    weights = np.ones(n, np.float32)
    heavy = np.array([0, 12_345, 2**23, 2**24 - 1, 2**24])
    weights[heavy] = n / 5
    drawn = draws(Weighted(weights), n, 200_000)
    counts = np.bincount(np.searchsorted(heavy, drawn[np.isin(drawn, heavy)]), minlength=5)
    others = drawn[~np.isin(drawn, heavy)]
    share = np.append(np.full(5, n / 5), n - 5) / (2 * n - 5)
    assert stats.chisquare([*counts, len(others)], share * len(drawn)).pvalue > UNLIKELY
    assert stats.chisquare(np.bincount(others * 64 // n, minlength=64)).pvalue > UNLIKELY
    flat = Weighted(np.ones(n + 2**20)).epoch(0, 0, n + 2**20)(np.arange(100_000))
    beyond = int((flat >= n).sum())
    assert stats.binomtest(beyond, len(flat), 2**20 / (n + 2**20)).pvalue > UNLIKELY


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.integers(1, 120),
    st.integers(1, 6),
    st.integers(0, 2**64 - 1),
    st.integers(0, 50),
    st.sampled_from(["pad", "drop", "exact"]),
    st.data(),
)
def test_every_world_draws_the_same(
    samples: int, quarter: int, seed: int, epoch: int, tail: Any, data: st.DataObject
) -> None:
    """Per global batch of 12 · quarter samples, pads aside; and the epoch is the draws at 0..samples-1."""
    order = Weighted([5, 0, 1, 1, 2, 3, 0], num_samples=samples)
    cursor = data.draw(st.integers(0, samples))
    epoch_draws = draws(order, 7, samples, seed=seed, epoch=epoch).tolist()
    for size in (1, 2, 3, 4):
        plans = [Plan(order, 7, 12 * quarter // size, World(rank, size), tail, seed) for rank in range(size)]
        assert {plan.samples for plan in plans} == {samples}
        for step in range(max(plan.steps(0, cursor) for plan in plans)):
            start = cursor + step * 12 * quarter
            read: Counter[int] = Counter()
            for plan in plans:
                if step < plan.steps(0, cursor):
                    positions = plan.positions(epoch, step, cursor)
                    read.update(plan.batch(epoch, step, cursor)[positions < samples].tolist())
            assert read == Counter(epoch_draws[start : start + 12 * quarter])


def test_epochs_and_seeds_draw_anew_and_pads_are_further_draws() -> None:
    order = Weighted(np.ones(1000))
    assert order.random
    assert draws(order, 1000, 50, seed=1).tolist() != draws(order, 1000, 50, seed=2).tolist()
    assert draws(order, 1000, 50, epoch=1).tolist() != draws(order, 1000, 50, epoch=2).tolist()
    beyond = draws(order, 1000, 3000)
    assert beyond[:1000].tolist() != beyond[1000:2000].tolist()
    assert order.epoch(0, 0, 1000)(np.array([2500, 7])).tolist() == beyond[[2500, 7]].tolist()


def test_the_length_of_an_epoch() -> None:
    assert Weighted([1, 2, 3]).samples(3) == 3
    assert Weighted([1, 2, 3], num_samples=1).samples(3) == 1
    assert Weighted([1, 2, 3], num_samples=np.int64(10**12)).samples(3) == 10**12  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "weights",
    [
        (1, 0, 3),
        np.array([1, 0, 3], np.float16),
        np.array([1, 0, 3], np.uint8),
        torch.tensor([1.0, 0.0, 3.0]),
        torch.tensor([1, 0, 3], dtype=torch.int32),
    ],
)
def test_weights_of_every_kind(weights: Any) -> None:
    np.testing.assert_array_equal(draws(Weighted(weights), 3, 100), draws(Weighted([1.0, 0.0, 3.0]), 3, 100))


def test_boolean_weights_choose() -> None:
    assert set(draws(Weighted(np.array([True, False, True])), 3, 100).tolist()) == {0, 2}


def test_it_does_not_follow_later_changes_of_its_argument_and_travels() -> None:
    weights = np.array([1.0, 0.0])
    order = Weighted(weights)
    weights[:] = [0.0, 1.0]
    assert set(draws(pickle.loads(pickle.dumps(order)), 2, 20).tolist()) == {0}


@pytest.mark.parametrize(
    ("weights", "error", "text"),
    [
        ([1, -0.5, -1], ValueError, r"weights\[1\]=-0\.5 is not allowed: expected finite numbers >= 0. 2 of 3"),
        ([1, float("nan")], ValueError, r"weights\[1\]=nan is not allowed.*1 of 2"),
        ([float("inf"), 1], ValueError, r"weights\[0\]=inf is not allowed"),
        ([1, 2, float("-inf")], ValueError, r"weights\[2\]=-inf is not allowed"),
        (torch.tensor([1.0, -1.0]), ValueError, r"weights\[1\]=-1\.0"),
        ([0, 0.0, 0], ValueError, "weights are all zero: expected at least one weight > 0"),
        ([0], ValueError, "all zero"),
        ([], ValueError, "weights is empty: expected a non-empty sequence of numbers"),
        ([[1, 2], [3, 4]], ValueError, r"weights of shape \(2, 2\) is not allowed.*one dimension"),
        (1.0, TypeError, r"weights=1\.0 is not allowed: expected a non-empty sequence.*got float"),
        (["1", "2"], TypeError, "weights of dtype <U1 are not allowed: expected real numbers >= 0"),
        ([1, 2j], TypeError, "dtype complex128"),
        ([1, None], TypeError, "dtype object"),
    ],
)
def test_weights_errors(weights: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Weighted(weights)


@pytest.mark.parametrize("weight", [1.7e308, 1.0, 5e-324])
def test_huge_and_tiny_weights_count_as_much_as_others(weight: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = Plan(Weighted([weight] * 4, num_samples=4000), 4, 4000).batch(0, 0)
    assert np.bincount(drawn, minlength=4).min() > 900


@pytest.mark.parametrize(
    ("num_samples", "error", "text"),
    [
        (0, ValueError, "num_samples=0 is not allowed: expected an integer >= 1. Leave it out"),
        (-1, ValueError, "num_samples=-1 is not allowed"),
        (1.5, TypeError, r"num_samples=1\.5 is not allowed.*got float"),
        (True, TypeError, "num_samples=True is not allowed.*got bool"),
        ("3", TypeError, "num_samples='3' is not allowed"),
    ],
)
def test_num_samples_errors(num_samples: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Weighted([1, 2], num_samples=num_samples)


@pytest.mark.parametrize("length", [1, 4])
def test_weights_of_another_dataset(length: int) -> None:
    text = rf"len\(weights\)=3 is not allowed: expected one weight per sample, len\(dataset\)={length}\. Compute"
    with pytest.raises(ValueError, match=text):
        Plan(Weighted([1, 2, 3], num_samples=2), length)


def test_the_stream_is_frozen() -> None:
    """Other draws would change what users who resume a run read."""
    order = Weighted([1, 0, 2, 4, 8, 16], num_samples=100)
    assert draws(order, 6, 12, seed=1, epoch=2).tolist() == [5, 3, 4, 4, 5, 5, 3, 5, 2, 4, 5, 5]
    assert Plan(order, 6, 4, World(1, 2), seed=7).batch(3, 5).tolist() == [5, 4, 0, 2]


# Without replacement.


def each_once(weights: Any, num_samples: int | None = None) -> Weighted:
    return Weighted(weights, num_samples, replacement=False)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.lists(st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 1.0, 3.0, 1e9, 1e300]), min_size=1, max_size=40).filter(any),
    st.integers(0, 2**64 - 1),
    st.integers(1, 5),
    st.data(),
)
def test_each_sample_that_can_be_drawn_comes_once(
    weights: list[float], seed: int, ranks: int, data: st.DataObject
) -> None:
    drawable = np.flatnonzero(weights)
    count = data.draw(st.none() | st.integers(1, len(drawable)))
    order = each_once(weights, count)
    plans = [Plan(order, len(weights), 2, World(rank, ranks), "exact", seed) for rank in range(ranks)]
    drawn = [index for plan in plans for step in range(plan.steps(3)) for index in plan.batch(3, step).tolist()]
    assert len(drawn) == len({*drawn}) == (count or len(drawable))
    assert {*drawn} <= {*drawable.tolist()}


@pytest.mark.parametrize(
    "weights", [[1, 2, 3, 4], [0.1, 0, 5e-1, 0.4], [1e-300, 2e-300, 5e-300], [1e300, 3e300, 1e299]]
)
def test_the_next_is_drawn_in_proportion_to_the_weights_that_are_left(weights: list[float]) -> None:
    order, share = each_once(weights), np.array(weights) / np.max(weights)
    firsts = Counter(tuple(draws(order, len(weights), 2, epoch=epoch).tolist()) for epoch in range(20_000))
    pairs = [(one, other) for one in np.flatnonzero(share) for other in np.flatnonzero(share) if one != other]
    expected = [share[one] / share.sum() * share[other] / (share.sum() - share[one]) for one, other in pairs]
    counts = [firsts[pair] for pair in pairs]
    assert sum(counts) == 20_000
    assert stats.chisquare(counts, np.array(expected) * 20_000).pvalue > UNLIKELY


def test_pads_are_the_first_samples_again() -> None:
    found = draws(each_once([1, 0, 2, 3]), 4, 6)
    assert found[:3].tolist() == found[3:].tolist()
    assert sorted(found[:3]) == [0, 2, 3]


def test_the_order_without_replacement_stays_what_it_is() -> None:
    """These numbers are part of saved runs."""
    assert draws(each_once([1, 2, 3, 4, 5, 6]), 6, 6, seed=7, epoch=1).tolist() == [2, 3, 5, 1, 4, 0]
    assert each_once([1, 2]) != Weighted([1, 2])
    assert each_once([1, 2]) == each_once([1, 2])
    assert each_once([1, 2]).described == Weighted([1, 2]).described.replace("None)", "None, False)")
    assert repr(each_once([1, 2, 0], 2)) == "Weighted(3 weights, num_samples=2, replacement=False)"
    assert pickle.loads(pickle.dumps(each_once([1, 2]))) == each_once([1, 2])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"weights": [1, 0, 2], "num_samples": 3},
            ValueError,
            r"num_samples=3 is not allowed: expected .* in \[1, 2\]",
        ),
        ({"weights": [1, 2], "num_samples": 0}, ValueError, "num_samples=0 is not allowed"),
        ({"weights": [0, 0]}, ValueError, "weights are all zero"),
    ],
)
def test_what_is_refused_without_replacement(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Weighted(**options, replacement=False)
    with pytest.raises(TypeError, match="replacement='no' is not allowed"):
        Weighted([1], replacement="no")  # type: ignore[arg-type]
