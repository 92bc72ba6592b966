"""An order over 10^12 samples: no rank may hold it."""

import tracemalloc

import pytest

from headrace import DataLoader, Weighted, World


@pytest.mark.parametrize("rank", [0, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_memory_does_not_grow_with_the_dataset(rank: int, shuffle: bool) -> None:
    tracemalloc.start()
    try:
        loader = DataLoader(range(10**12), batch_size=256, shuffle=shuffle, distributed=World(rank, 8))
        batch = next(iter(loader))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * 2**20
    assert len(set(batch.tolist())) == 256
    assert len(loader) == -(-(10**12) // (256 * 8))


@pytest.mark.slow
def test_weights_beyond_torchs_limit_through_the_loader() -> None:
    size = 2**24 + 1
    weights = [0.0] * size
    weights[-1] = 1.0
    loader = DataLoader(range(size), batch_size=4, order=Weighted(weights, num_samples=8), distributed=World(1, 2))
    assert next(iter(loader)).tolist() == [size - 1] * 4
