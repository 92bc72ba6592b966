"""The keyed permutation: a bijection at every size, the same wherever it is evaluated, and a good shuffle."""

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan.keys import key
from headrace.plan.permute import SMALL, _Network, permutation
from late import Late

stats = Late("scipy.stats")

UNLIKELY = 1e-4
SIZES = [
    *range(1, 18),
    *(255, 256, 257, 999, 1000, 1009),
    *(SMALL - 1, SMALL, SMALL + 1, 65_537 + 2, 257**2 - 1, 257**2, 257**2 + 1, 99_991, 316**2, 316**2 + 1),
]


def many(n: int, count: int, make=permutation) -> np.ndarray:
    """The images of 0..n-1 under `count` keys, shape (count, n)."""
    return np.stack([make(key("test", n, number), n)(np.arange(n)) for number in range(count)])


def assert_bijection(images: np.ndarray, n: int) -> None:
    assert images.dtype == np.int64
    assert images.min() >= 0
    assert np.bincount(images, minlength=n).tolist() == [1] * n


def test_every_size_is_permuted() -> None:
    for n in SIZES:
        assert_bijection(permutation(key("x", n), n)(np.arange(n)), n)


@pytest.mark.parametrize("n", [999_983, 10**6 - 1, 10**6, 10**6 + 1])
def test_a_million_is_permuted(n: int) -> None:
    assert_bijection(permutation(key("x", n), n)(np.arange(n)), n)


def test_the_network_permutes_every_small_domain_too() -> None:
    for n in range(1, 300):
        assert_bijection(_Network(key("x", n), n)(np.arange(n)), n)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.integers(1, 2**62))
def test_the_networks_domain_hardly_exceeds_n(n: int) -> None:
    """Cycle walking is cheap, and no product or sum in the network leaves 64 bits."""
    network = _Network(key("x"), n)
    a, b = int(network._a), int(network._b)
    assert n <= a * b < n + a
    assert a == math.isqrt(n - 1) + 1
    ends = np.array([0, n // 2, n - 1])
    images = network(ends)
    assert ((images >= 0) & (images < n)).all()
    assert len(set(images.tolist())) == len(set(ends.tolist()))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.sampled_from([1, 2, 11, 1000, SMALL - 1, SMALL, SMALL + 1, 10**6, 10**9, 10**12]), st.data())
def test_evaluation_anywhere_is_evaluation_in_bulk(n: int, data: st.DataObject) -> None:
    shuffled = permutation(key("x", n), n)
    wanted = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)), np.int64)
    before = wanted.copy()
    images = shuffled(wanted)
    assert images.shape == wanted.shape
    np.testing.assert_array_equal(wanted, before, err_msg="the argument was written to")
    for position, image in zip(wanted, images, strict=True):
        assert shuffled(np.array([position])).tolist() == [image]
    np.testing.assert_array_equal(permutation(key("x", n), n)(wanted[::-1]), images[::-1])
    if n <= SMALL + 1:
        np.testing.assert_array_equal(shuffled(np.arange(n))[wanted], images)


def test_no_positions() -> None:
    for n in (5, SMALL, 10**12):
        assert permutation(key("x"), n)(np.empty(0, np.int64)).tolist() == []


def test_a_trillion() -> None:
    n = 10**12
    shuffled = permutation(key("x", n), n)
    positions = np.concatenate([np.arange(100_000), n - 1 - np.arange(100_000), np.arange(1, 100_000) * 9_999_991])
    images = shuffled(positions)
    assert images.dtype == np.int64
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == len(np.unique(positions))
    assert stats.chisquare(np.bincount(images // (n // 1000), minlength=1000)).pvalue > UNLIKELY
    assert stats.chisquare(np.bincount(images % 1000)).pvalue > UNLIKELY, "the low digits too"
    steps = np.diff(images[:100_000]) % n
    assert stats.chisquare(np.bincount(steps // (n // 1000), minlength=1000)).pvalue > UNLIKELY
    assert (shuffled(positions[:1000]) != permutation(key("x", n, 0), n)(positions[:1000])).all()


@pytest.mark.parametrize(("n", "count"), [(2, 4000), (3, 6000), (4, 12_000), (5, 12_000), (6, 20_000)])
def test_small_permutations_are_equally_likely(n: int, count: int) -> None:
    number_of = {images: number for number, images in enumerate(permutations(range(n)))}
    drawn = np.bincount([number_of[tuple(row)] for row in many(n, count).tolist()], minlength=len(number_of))
    assert stats.chisquare(drawn).pvalue > UNLIKELY
    odd = [sum(a > b for place, a in enumerate(row) for b in row[place:]) % 2 for row in number_of]
    assert stats.binomtest(int(drawn[np.array(odd, bool)].sum()), count).pvalue > UNLIKELY


WHOLE = [(permutation, 101, 3000), (permutation, 1000, 400), (_Network, 257, 3000), (_Network, 1000, 1000)]
WHOLE_IDS = ["table-101", "table-1000", "network-257", "network-1000"]


@pytest.mark.parametrize(("make", "n", "count"), WHOLE, ids=WHOLE_IDS)
def test_whole_codebooks(make, n: int, count: int) -> None:
    """Where positions land, how neighbours differ, fixed points and order, over many keys."""
    images = many(n, count, make)
    landed = np.bincount((np.arange(n) * n + images).ravel(), minlength=n * n)
    # The counts of random permutation matrices: n / (n - 1) times chi-square with (n - 1)² degrees of freedom.
    spread = ((landed - count / n) ** 2).sum() / (count / n) * (n - 1) / n
    assert UNLIKELY < stats.chi2.sf(spread, (n - 1) ** 2) < 1 - UNLIKELY
    for apart in (1, 2, math.isqrt(n), math.isqrt(n - 1) + 1):
        steps = (images[:, apart:] - images[:, :-apart]) % n
        assert stats.chisquare(np.bincount(steps.ravel(), minlength=n)[1:]).pvalue > UNLIKELY
    poisson_1 = np.append(stats.poisson.pmf(range(5), 1), stats.poisson.sf(4, 1))
    fixed = np.bincount(np.minimum((images == np.arange(n)).sum(axis=1), 5), minlength=6)
    assert stats.chisquare(fixed, poisson_1 * count).pvalue > UNLIKELY
    agree = np.bincount(np.minimum((images[1:] == images[:-1]).sum(axis=1), 5), minlength=6)
    assert stats.chisquare(agree, poisson_1 * (count - 1)).pvalue > UNLIKELY, "neighbouring keys"
    centred = images - (n - 1) / 2
    ranks = (centred @ (np.arange(n) - (n - 1) / 2)) / (centred[0] @ centred[0]) * math.sqrt(n - 1)
    assert stats.kstest(ranks, "norm").pvalue > UNLIKELY, "rank correlation with the unshuffled order"
    pairs = images[:, 0] % 7 * 7 + images[:, 1] % 7
    share = np.bincount(np.arange(n) % 7) / n
    assert stats.chisquare(np.bincount(pairs, minlength=49), np.outer(share, share).ravel() * count).pvalue > UNLIKELY


@pytest.mark.parametrize("n", [SMALL - 1, SMALL, 10**6, 10**12])
def test_first_and_last_places_land_anywhere(n: int) -> None:
    count = 1000 if n >= SMALL else 200
    ends = np.concatenate([np.arange(8), n - 1 - np.arange(8)])
    images = np.stack([permutation(key("test", number), n)(ends) for number in range(count)])
    for column in images.T:
        assert stats.chisquare(np.bincount(column * 16 // n, minlength=16)).pvalue > UNLIKELY
        assert stats.chisquare(np.bincount(column % 5)).pvalue > UNLIKELY
    together = np.bincount((images[:, 0] * 8 // n) * 8 + images[:, 1] * 8 // n, minlength=64)
    assert stats.chisquare(together).pvalue > UNLIKELY


@pytest.mark.parametrize("n", [SMALL - 1, SMALL, 10**6])
def test_one_large_permutation_is_well_mixed(n: int) -> None:
    images = permutation(key("test"), n)(np.arange(n))
    blocks = np.bincount(np.arange(n) * 32 // n * 32 + images * 32 // n, minlength=1024)
    assert stats.chisquare(blocks).pvalue > UNLIKELY
    steps = (images[1:] - images[:-1]) % n
    assert stats.chisquare(np.bincount(steps * 256 // n, minlength=256)).pvalue > UNLIKELY
    low = np.bincount(np.arange(n - n % 16) % 16 * 16 + images[: n - n % 16] % 16, minlength=256)
    share = np.bincount(np.arange(n) % 16) / n
    assert stats.chisquare(low, np.tile(share, 16) * (n - n % 16) / 16).pvalue > UNLIKELY
    assert abs(stats.spearmanr(np.arange(n), images).statistic) * math.sqrt(n) < 4
    assert (images == np.arange(n)).sum() < 10
    runs = (images[1:] > images[:-1]).mean()
    assert abs(runs - 0.5) * math.sqrt(12 * n) < 4


def test_the_stream_is_frozen() -> None:
    """Other permutations would give users who resume a run samples twice and others never."""
    assert permutation(key("shuffle", 0, 0), 11)(np.arange(11)).tolist() == [5, 8, 7, 9, 10, 6, 3, 0, 1, 2, 4]
    assert permutation(key("shuffle", 1, 2), SMALL - 1)(np.arange(6)).tolist() == [
        25840,
        40132,
        40174,
        65041,
        58301,
        5269,
    ]
    assert permutation(key("shuffle", 1, 2), SMALL)(np.arange(6)).tolist() == [39004, 25477, 23167, 61023, 60374, 8381]
    ends = np.array([0, 1, 2, 10**12 - 1])
    assert permutation(key("shuffle", 1, 2), 10**12)(ends).tolist() == [
        308164315260,
        84232847001,
        14495252461,
        298819494720,
    ]
