"""Keys and hashing: different inputs give unrelated words, and the same inputs the same words for ever."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan import keys
from headrace.plan.keys import Key, generator_seeds, generator_seeds_at, hash64, key, mix, uniforms
from late import Late

stats = Late("scipy.stats")

UNLIKELY = 1e-4
COUNTERS = np.random.default_rng(0).integers(0, 2**64, 4096, dtype=np.uint64)
PURPOSES = st.text("ab\0é", max_size=3)
WORDS = st.lists(st.integers(0, 2**64 - 1), max_size=4).map(tuple)


def bits(words: np.ndarray) -> np.ndarray:
    """The 64 bits of each word as 0 and 1, shape (..., 64)."""
    return (words[..., None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)


def test_keys_tell_every_input_apart() -> None:
    large = [2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1]
    inputs = [
        *product(
            ["x", "y", "", "xx", "x\0", "deal", "pass"],
            [(), (0,), (0, 0), (0, 0, 0), (1,), (1, 2), (2, 1), (7, 3), (7, 3, 0), (0, 7, 3), (73,)],
        ),
        *(("x", (word,)) for word in large),
        *(("x", pair) for pair in product(large, repeat=2)),
        *(("x", (word, 0)) for word in large),
        *(("x", (0, word)) for word in large),
    ]
    assert len(set(inputs)) == len(inputs)
    halves = [half for purpose, words in inputs for half in key(purpose, *words)]
    assert len(set(halves)) == 2 * len(inputs), "not even half a key is shared"


def test_words_are_not_text_and_sums_do_not_collide() -> None:
    assert key("1") != key("", 1)
    assert key("x1", 2) != key("x", 12)
    assert key("x", 0) != key("x\1" + "\0" * 7), "nor does a purpose run over into its words"
    assert len({key("x", seed, epoch) for seed in range(30) for epoch in range(30)}) == 900


@settings(deadline=None, derandomize=True, max_examples=200)
@given(PURPOSES, WORDS, PURPOSES, WORDS)
def test_keys_are_equal_where_their_inputs_are(
    purpose: str, words: tuple[int, ...], other: str, others: tuple[int, ...]
) -> None:
    assert key(purpose, *words) == key(purpose, *words)
    assert (key(purpose, *words) == key(other, *others)) == ((purpose, words) == (other, others))


@pytest.mark.parametrize("word", [-1, 2**64, -(2**63), 2**100])
def test_a_word_out_of_range_is_refused(word: int) -> None:
    with pytest.raises(OverflowError):
        key("x", 1, word)


def test_numpy_words_are_the_same_words() -> None:
    assert key("x", *map(int, np.arange(3))) == key("x", *np.arange(3)) == key("x", *np.arange(3, dtype=np.uint8))


def test_hash_is_one_function_of_each_counter() -> None:
    under = key("x", 1)
    counters = COUNTERS[:600].reshape(20, 30).copy()
    hashed = hash64(under, counters)
    assert hashed.shape == (20, 30)
    assert hashed.dtype == np.uint64
    np.testing.assert_array_equal(counters, COUNTERS[:600].reshape(20, 30), err_msg="the argument was written to")
    np.testing.assert_array_equal(hashed[7:9, ::-3], hash64(under, counters[7:9, ::-3]))
    single = np.concatenate([hash64(under, counters[3, place : place + 1]) for place in range(30)])
    np.testing.assert_array_equal(hashed[3], single)
    small = np.arange(100)
    for dtype in (np.int8, np.int32, np.uint64):
        np.testing.assert_array_equal(hash64(under, small), hash64(under, small.astype(dtype)))


def test_hash_is_a_bijection() -> None:
    for words in (np.arange(2**16), np.arange(2**16) << 40, COUNTERS):
        assert len(np.unique(hash64(key("x"), words))) == len(words)
        assert len(np.unique(mix(words.astype(np.uint64)))) == len(words)


@pytest.mark.parametrize("counters", [np.arange(2**14), np.arange(2**14) << 20, np.arange(2**14) * 3], ids=range(3))
def test_every_bit_is_balanced_and_unrelated_to_the_others(counters: np.ndarray) -> None:
    for word in range(2):
        ones = bits(hash64(key("balance", word), counters)).astype(np.float64)
        z = (ones.sum(axis=0) - len(counters) / 2) / np.sqrt(len(counters) / 4)
        assert stats.chi2.sf((z**2).sum(), 64) > UNLIKELY
        correlation = np.corrcoef(ones.T)[np.triu_indices(64, 1)]
        assert stats.chi2.sf((correlation**2).sum() * len(counters), correlation.size) > UNLIKELY
        along = np.corrcoef(np.roll(ones, 1, axis=0).T, ones.T)[:64, 64:]
        assert stats.chi2.sf((along**2).sum() * len(counters), along.size) > UNLIKELY


def flips(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """How often each of the 64 bits changed, shape (64,), in units of its standard deviation."""
    return (bits(before ^ after).sum(axis=0, dtype=np.int64) - len(before) / 2) / np.sqrt(len(before) / 4)


def test_one_bit_of_a_counter_or_of_a_key_changes_half_the_bits() -> None:
    under = key("avalanche")
    before = hash64(under, COUNTERS)
    in_counter = [flips(before, hash64(under, COUNTERS ^ np.uint64(1 << bit))) for bit in range(64)]
    in_low = [flips(before, hash64(Key(under.low ^ (1 << bit), under.high), COUNTERS)) for bit in range(64)]
    in_high = [flips(before, hash64(Key(under.low, under.high ^ (1 << bit)), COUNTERS)) for bit in range(64)]
    for z in map(np.array, (in_counter, in_low, in_high)):
        assert np.abs(z).max() < 7
        assert np.mean(z**2) < 1.1


def test_neighbouring_keys_are_unrelated() -> None:
    counters = np.arange(4096)
    streams = [hash64(key("x", *words), counters) for words in [(0, 0), (0, 1), (1, 0), (1, 1), (2**32, 0), (0, 0, 0)]]
    for one, other in combinations(streams, 2):
        assert not np.intersect1d(one, other).size
        assert stats.chi2.sf((flips(one, other) ** 2).sum(), 64) > UNLIKELY


def test_uniforms_fill_the_half_open_interval_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = uniforms(key("x", 5), np.arange(100_000).reshape(100, 1000))
    assert drawn.shape == (100, 1000)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert np.all(drawn * 2**53 == np.floor(drawn * 2**53)), "multiples of 2^-53"
    assert stats.kstest(drawn.ravel(), "uniform").pvalue > UNLIKELY
    pairs = np.histogram2d(drawn[:, :-1].ravel(), drawn[:, 1:].ravel(), bins=16, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(pairs.ravel()).pvalue > UNLIKELY
    for word, expected in [(2**64 - 1, 1 - 2.0**-53), (2**11 - 1, 0.0), (2**11, 2.0**-53)]:
        monkeypatch.setattr(keys, "hash64", lambda *_, word=word: np.array([word], np.uint64))
        assert uniforms(key("x"), np.arange(1)).tolist() == [expected]


def test_generator_seeds() -> None:
    under = key("sample", 0, 0)
    seeds = generator_seeds(under, np.arange(10_000))
    assert seeds.shape == (10_000, 3)
    assert seeds.dtype == np.uint64
    assert seeds[:, 2].max() < 2**32, "numpy.random.seed takes 32 bits"
    assert (seeds[:, :2].max(axis=0) >= 2**63).all(), "torch and random get all 64 bits"
    assert len(np.unique(seeds[:, :2])) == 20_000, "no word serves two positions or two generators"
    assert generator_seeds(under, np.empty(0, np.int64)).shape == (0, 3)
    some = np.array([9, 3, 3, 9_999])
    np.testing.assert_array_equal(generator_seeds(under, some), seeds[some])


def test_the_stream_is_frozen() -> None:
    """Other outputs would give users who resume a run another order and other augmentation."""
    assert key("shuffle", 1, 2) == (10707299595316765934, 9034874169281645332)
    assert key("", 2**64 - 1) == (16372670709798514212, 12835764371077460220)
    assert hash64(key("shuffle", 1, 2), np.array([0, 1, 2, 2**40])).tolist() == [
        7715280559354446568,
        7881754027368361080,
        16131041550750719910,
        1997405699927996534,
    ]
    assert uniforms(key("shuffle", 1, 2), np.arange(2)).tolist() == [0.4182461971893634, 0.4272707419734575]
    assert generator_seeds(key("sample", 7, 0), np.array([0, 10**12])).tolist() == [
        [12184150613608552655, 14499822463707694591, 3601053918],
        [1230506868260872465, 8882386041359353197, 3299412785],
    ]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.builds(Key, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), st.integers(0, 2**61))
def test_one_position_alone_has_the_seeds_that_it_has_among_others(under: Key, position: int) -> None:
    assert generator_seeds_at(under, position) == generator_seeds(under, np.array([position]))[0].tolist()
