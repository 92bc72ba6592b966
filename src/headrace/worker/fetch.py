"""Fetching the samples of a batch: one after another, in one call, or several at a time; and replacing broken ones."""

import reprlib
import textwrap
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import Dataset, StackDataset, Subset

from headrace.errors import note
from headrace.plan.keys import sample_seeds
from headrace.randomness import Drawing, Generators, Keys, here, seed_from_words, wait_for_all
from headrace.system.torch_threads import begin_with_torch_threads
from headrace.types import Remark, Replaced

Substitutes = Callable[[int, int], Sequence[int]]
"""Tells which indices to try, given the epoch and the position of a sample that cannot be fetched."""

_ERROR_CHARACTERS = 300
"""How much of an error's text is recorded; its sample may have been of any size, and in the text."""


class Fetcher:
    """Fetches from a map-style dataset.

    Args:
        dataset: The dataset.
        batched: Whether it may be asked for several samples in one call.
        keyed: Whether each sample has randomness of its own, rather than torch's, draw by draw.
        threads: How many samples to fetch at a time.
        shared: Whether other workers draw from the same process's generators meanwhile.
        remarks: Where it puts what the user should hear of.
        substitutes: What replaces a sample that cannot be fetched; None where errors are raised.
    """

    def __init__(
        self,
        dataset: Any,
        batched: bool,
        keyed: bool,
        threads: int,
        shared: bool,
        remarks: list[Remark],
        substitutes: Substitutes | None = None,
    ) -> None:
        self._dataset = dataset
        self._shared = shared
        self._remarks = remarks
        self._substitutes = substitutes
        self._threads = threads if batched else 1
        # Torch's own wrappers have a bulk call that only passes on; sample by sample each keeps its own randomness.
        through = keyed or threads > 1
        self._in_bulk = batched and bool(
            fetches_in_bulk(dataset) if through else getattr(dataset, "__getitems__", None)
        )
        self._pool: ThreadPoolExecutor | None = None

    def fetch(self, indices: Any, keys: Keys, seeded: bool, step: int | None = None) -> Sequence[Any]:
        """Return the samples at the indices, in their order.

        Args:
            indices: What the dataset is asked for.
            keys: What the samples' randomness is keyed by.
            seeded: Whether to seed the process's generators for each sample, or for all if they come in one call.
            step: The plan's step, whose samples have positions; None if there is no plan.
        """
        here.drawing = drawing = Drawing(keys, 0)
        if self._in_bulk:
            return self._bulk(indices, drawing, seeded, step)
        indices = list(indices)
        # Where generators are shared a batch is seeded only after it was seen to draw: then one by one.
        if self._threads > 1 and len(indices) > 1 and not (self._shared and seeded):
            samples = self._several(indices, keys, step)
            if samples is not None:
                return samples
        return self._one_by_one(indices, drawing, seeded, step)

    def _bulk(self, indices: Any, drawing: Drawing, seeded: bool, step: int | None) -> Sequence[Any]:
        if seeded:
            seed_from_words(_seeds(drawing.keys, 1)[0])
        try:
            samples: Sequence[Any] = self._dataset.__getitems__(indices)
        except Exception as error:
            note(error, f"while fetching samples {reprlib.repr(indices)}{_position(drawing.keys, 0, step)}")
            if not self._replaces(error) or not fetches_singly(self._dataset):
                raise
            drawing.anew()
            # Only one by one shows which sample is the broken one.
            return self._one_by_one(list(indices), drawing, seeded, step)
        return samples

    def _one_by_one(self, indices: list[Any], drawing: Drawing, seeded: bool, step: int | None) -> list[Any]:
        samples: list[Any] = [None] * len(indices)
        replaced: dict[int, Replaced] = {}
        try:
            self._fill(samples, range(len(indices)), indices, drawing, seeded, step, replaced)
        finally:
            if replaced:
                self._remarks.extend(replaced.values())
        return samples

    def _fill(
        self,
        samples: list[Any],
        places: Iterable[int],
        indices: list[Any],
        drawing: Drawing,
        seeded: bool,
        step: int | None,
        replaced: dict[int, Replaced],
    ) -> None:
        """Fetch the samples at some places of a batch; note in `replaced`, by place, those that others stand for."""
        dataset, keys = self._dataset, drawing.keys
        seeds = _seeds(keys, len(indices)) if seeded else None
        for place in places:
            if seeds is not None:
                seed_from_words(seeds[place])
            drawing.place = place
            try:
                samples[place] = dataset[indices[place]]
            except Exception as error:
                index = indices[place]
                note(error, f"while fetching sample {index!r}{_position(keys, place, step)}")
                if step is None or not self._replaces(error):
                    raise
                instead = self._instead(error, drawing, seeded)
                if instead is None:
                    raise
                substitute, samples[place] = instead
                position = keys.numbers[place]
                replaced[place] = Replaced(keys.epoch, step, position, index, substitute, _in_one_line(error))

    def _instead(self, error: Exception, drawing: Drawing, seeded: bool) -> tuple[int, Any] | None:
        """Return the index and the sample that take a broken one's place; None, and a note, if there is none."""
        assert self._substitutes is not None
        keys = drawing.keys
        position = keys.numbers[drawing.place]
        substitutes = self._substitutes(keys.epoch, position)
        for substitute in substitutes:
            # It takes the place with all that belongs to it: the random numbers are those of the position.
            drawing.anew()
            if seeded:
                seed_from_words(_seeds(Keys(keys.seed, keys.epoch, [position]), 1)[0])
            try:
                return substitute, self._dataset[substitute]
            except Exception as another:
                if not self._replaces(another):
                    note(another, f"while fetching sample {substitute} as a substitute")
                    raise
        note(error, f"{len(substitutes)} substitutes failed too: samples {substitutes}")
        return None

    def _replaces(self, error: Exception) -> bool:
        """Tell whether an error is the sample's, and to be replaced; out of memory is the machine's."""
        return self._substitutes is not None and not isinstance(error, MemoryError)

    def _several(self, indices: list[Any], keys: Keys, step: int | None) -> list[Any] | None:
        """Fetch in threads. None, and the generators as before, if one of them was drawn from: then order matters."""
        before = None if self._shared else Generators()
        samples: list[Any] = [None] * len(indices)
        errors: dict[int, BaseException] = {}
        replaced: dict[int, Replaced] = {}
        places = deque(range(len(indices)))
        lease = here.lease

        def left() -> Iterator[int]:
            while places and not errors:
                try:
                    yield places.popleft()
                except IndexError:  # another thread took the last one
                    return

        def work() -> None:
            here.drawing = drawing = Drawing(keys, 0)
            here.lease = lease
            try:
                self._fill(samples, left(), indices, drawing, False, step, replaced)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors[drawing.place] = error
            finally:
                here.drawing = here.lease = None

        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                self._threads, "headrace-fetch", begin_with_torch_threads, (torch.get_num_threads(),)
            )
        try:
            wait_for_all([self._pool.submit(work) for _ in range(min(self._threads, len(indices)))])
        finally:
            places.clear()  # interrupted: nothing more is begun
        moved = before.moved() if before is not None else []
        if before is not None and moved:
            before.restore()
            self._threads = 1
            outcome = "this worker fetches one sample at a time from now on"
            self._remarks.append(drawing_remark(moved, "fetch_threads", outcome))
            return None
        # As if fetched in order: whatever lies before an error was begun before it, and what lies behind it was not.
        end = min(errors, default=len(indices))
        self._remarks.extend(replaced[place] for place in sorted(replaced) if place < end)
        if errors:
            first = errors[end]
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


def _position(keys: Keys, place: int, step: int | None) -> str:
    """Word where a sample stands, if there is a plan."""
    return "" if step is None else f", position {keys.numbers[place]} of epoch {keys.epoch}, step {step}"


def _in_one_line(error: Exception) -> str:
    text = str(traceback.TracebackException(type(error), error, None))  # also of an error whose own __str__ fails
    return textwrap.shorten(f"{type(error).__name__}: {text}", _ERROR_CHARACTERS, placeholder=" ...")


def _seeds(keys: Keys, count: int) -> Sequence[Sequence[int]]:
    return keys.words or sample_seeds(keys.seed, keys.epoch, keys.numbers[:count])


def fetches_in_bulk(dataset: Any) -> bool:
    """Tell whether a dataset has a `__getitems__` that a user wrote, looking through torch's own wrappers."""
    dataset = _behind(dataset)
    bulk = getattr(type(dataset), "__getitems__", None)
    if bulk is Subset.__getitems__:
        return fetches_in_bulk(dataset.dataset)
    if bulk is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(fetches_in_bulk(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return bool(getattr(dataset, "__getitems__", None))


def fetches_singly(dataset: Any) -> bool:
    """Tell whether a dataset has a `__getitem__` of its own, looking through torch's wrappers; torch's only raises."""
    dataset = _behind(dataset)
    single = getattr(type(dataset), "__getitem__", None)
    if single is Subset.__getitem__:
        return fetches_singly(dataset.dataset)
    if single is StackDataset.__getitem__:
        parts = dataset.datasets
        return all(map(fetches_singly, parts.values() if isinstance(parts, dict) else parts))
    return single not in (None, Dataset.__getitem__)


def _behind(dataset: Any) -> Any:
    """Return the dataset whose bulk call this one hands on, as one that is built late does; mostly itself."""
    if not isinstance(getattr(type(dataset), "__getitems__", None), property):
        return dataset
    return getattr(getattr(dataset, "__getitems__", None), "__self__", dataset)
