"""Fetching the samples of a batch: one after another, in one call, or several at a time."""

import reprlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from torch.utils.data import StackDataset, Subset

from headrace.plan.keys import sample_seeds
from headrace.randomness import Generators, Keys, here, seed_from_words, wait_for_all

Fetch = Callable[[int, Any], Any]
"""Fetches one sample, given its place in the batch and its index."""


class Fetcher:
    """Fetches from a map-style dataset.

    Args:
        dataset: The dataset.
        batched: Whether it may be asked for several samples in one call.
        keyed: Whether each sample has randomness of its own, rather than torch's, draw by draw.
        threads: How many samples to fetch at a time.
        shared: Whether other workers draw from the same process's generators meanwhile.
        remark: Called with what the user should be warned of.
    """

    def __init__(
        self, dataset: Any, batched: bool, keyed: bool, threads: int, shared: bool, remark: Callable[[str], None]
    ) -> None:
        self._dataset = dataset
        self._shared = shared
        self._remark = remark
        self._threads = threads if batched else 1
        # Torch's own wrappers have a bulk call that only passes on; sample by sample each keeps its own randomness.
        through = keyed or threads > 1
        self._in_bulk = batched and bool(
            fetches_in_bulk(dataset) if through else getattr(dataset, "__getitems__", None)
        )
        self._pool: ThreadPoolExecutor | None = None

    def fetch(self, indices: Any, keys: Keys, seeded: bool, where: str = "") -> Sequence[Any]:
        """Return the samples at the indices, in their order.

        Args:
            indices: What the dataset is asked for.
            keys: What the samples' randomness is keyed by.
            seeded: Whether to seed the process's generators for each sample, or for all if they come in one call.
            where: What errors say after a sample's position; nothing if it has none.
        """
        here.keys, here.place = keys, 0
        if self._in_bulk:
            if seeded:
                seed_from_words(_seeds(keys, 1)[0])
            return self._bulk(indices, keys, where)
        fetch = self._one(keys, where)
        if self._threads > 1:
            indices = list(indices)
            # Where generators are shared a batch is seeded only after it was seen to draw: then one by one.
            if len(indices) > 1 and not (self._shared and seeded):
                samples = self._several(indices, fetch, keys)
                if samples is not None:
                    return samples
        if not seeded:
            return [fetch(place, index) for place, index in enumerate(indices)]
        samples = []
        indices = list(indices)
        for place, words in enumerate(_seeds(keys, len(indices))):
            seed_from_words(words)
            samples.append(fetch(place, indices[place]))
        return samples

    def _bulk(self, indices: Any, keys: Keys, where: str) -> Sequence[Any]:
        try:
            samples: Sequence[Any] = self._dataset.__getitems__(indices)
        except Exception as error:
            position = f", position {keys.numbers[0]}{where}" if where else ""
            error.add_note(f"headrace: while fetching samples {reprlib.repr(indices)}{position}")
            raise
        return samples

    def _one(self, keys: Keys, where: str) -> Fetch:
        dataset = self._dataset

        def fetch(place: int, index: Any) -> Any:
            here.place = place
            try:
                return dataset[index]
            except Exception as error:
                position = f", position {keys.numbers[place]}{where}" if where else ""
                error.add_note(f"headrace: while fetching sample {index!r}{position}")
                raise

        return fetch

    def _several(self, indices: Any, fetch: Fetch, keys: Keys) -> list[Any] | None:
        """Fetch in threads. None, and the generators as before, if one of them was drawn from: then order matters."""
        before = None if self._shared else Generators()
        samples: list[Any] = [None] * len(indices)
        errors: dict[int, BaseException] = {}
        places = deque(range(len(indices)))

        def work() -> None:
            outer = here.enter()
            here.keys = keys
            while places and not errors:
                try:
                    place = places.popleft()
                except IndexError:  # another thread took the last one
                    break
                try:
                    samples[place] = fetch(place, indices[place])
                except BaseException as error:  # noqa: BLE001 - raised below
                    errors[place] = error
            here.leave(outer)

        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="headrace-fetch")
        try:
            wait_for_all([self._pool.submit(work) for _ in range(min(self._threads, len(indices)))])
        finally:
            places.clear()  # interrupted: nothing more is begun
        moved = before.moved() if before is not None else []
        if before is not None and moved:
            before.restore()
            self._threads = 1
            self._remark(drawing_remark(moved, "fetch_threads", "this worker fetches one sample at a time from now on"))
            return None
        if errors:
            first = errors[min(errors)]  # as if fetched in order: whatever lies before it was begun before it
            errors.clear()
            try:
                raise first
            finally:
                del first  # which would hold this frame, and this frame it
        return samples


def drawing_remark(moved: Sequence[str], option: str, outcome: str) -> str:
    """Word the warning about draws from generators that threads share."""
    return (
        f"the dataset or collate_fn draws from the global generator of {' and '.join(moved)}, which threads share: the "
        f"batch was computed again, and with {option} {outcome}. The batches are right, but slow. Draw from "
        "headrace.rng() or headrace.torch_rng(), which are each sample's own, or leave the option out."
    )


def _seeds(keys: Keys, count: int) -> list[list[int]]:
    words: list[list[int]] = sample_seeds(keys.seed, keys.epoch, np.asarray(keys.numbers[:count])).tolist()
    return words


def fetches_in_bulk(dataset: Any) -> bool:
    """Tell whether a dataset has a `__getitems__` that a user wrote, looking through torch's own wrappers."""
    bulk = getattr(type(dataset), "__getitems__", None)
    if bulk is Subset.__getitems__:
        return fetches_in_bulk(dataset.dataset)
    if bulk is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(fetches_in_bulk(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return bool(getattr(dataset, "__getitems__", None))
