"""Streams, the samples of an iterable dataset: one worker's pass over its copy, its place, and its batches."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from headrace.memory.checksum import checksum
from headrace.randomness import COLLATION, KeyedGenerators, Keys, thread_randomness
from headrace.types import StreamPlace, StreamStart
from headrace.worker.sharing import StreamShare

REREAD_DIFFERS = (
    "the iterable dataset was read again up to the place in the loaded state, and yielded other data than were "
    "delivered before that was saved: from here on samples may come twice or never. Something in it draws from what no "
    "seed of the loader's decides, such as a shuffle that seeds itself from the time. Give that a fixed seed, or give "
    "the dataset state_dict and load_state_dict."
)
"""The warning where a stream that is read again differs from what was delivered."""


class StreamEnd(NamedTuple):
    """The answer to a task on an iterable dataset when the worker's copy is at its end.

    Attributes:
        of_dataset: The dataset's own state then; None if it keeps none.
    """

    of_dataset: Any = None


class Portion(NamedTuple):
    """A batch of an iterable dataset. The worker sends it with what the rank needs for a state.

    Attributes:
        samples: Samples in the batch.
        batch: The batch.
        place: Where the worker's pass over its copy stands after the batch.
    """

    samples: int
    batch: Any
    place: StreamPlace


class Stream:
    """A pass over an iterable dataset.

    Args:
        dataset: The worker's copy.
        share: Splits it over the ranks; None where it is not split.
        keys: Key `headrace.rng()` in it: a seed and the worker.
        start: Where it begins.

    Attributes:
        again: How many batches that were delivered before are still to be read again.
    """

    def __init__(self, dataset: Any, share: StreamShare | None, keys: tuple[int, int], start: StreamStart) -> None:
        self._dataset = dataset
        self._keys = keys
        if _loses_samples(dataset):  # states of older releases have its own
            start = start._replace(place=StreamPlace(checksum=start.place.checksum))
        place = start.place
        stateful = place.of_dataset is not None or place.of_iterator is not None
        between = stateful and not start.batches
        self._fallbacks = _other_beginnings(dataset, _states_before(dataset)) if between else iter(())
        self._share = share
        self._read = start.read if stateful else 0
        self.again = 0 if stateful else start.batches
        self._expected = None if stateful else place.checksum
        self._begin(_restored(dataset, start))

    def _begin(self, samples: Iterator[Any]) -> None:
        dataset, share = self._dataset, self._share
        # Dealt streams are read again: no state covers the samples of other ranks in between.
        self._of_dataset = dataset if share is None and samples is not dataset and has_state(dataset) else None
        self._of_iterator = samples if share is None and has_state(samples) else None
        self._checksum = 0 if self._of_dataset is self._of_iterator is None else None
        self._samples = samples if share is None else share.of(samples)

    def end(self) -> StreamEnd:
        """Stop reading: later calls of `next` find no sample. Return the mark of the end, with the dataset's state."""
        self._samples = iter(())
        return StreamEnd(_state_of(self._dataset) if has_state(self._dataset) else None)

    def next(self, wanted: int, drop_last: bool, merge: Callable[[list[Any]], Any]) -> Portion | StreamEnd:
        """Return the next batch.

        Args:
            wanted: How many samples it is to have.
            drop_last: Whether a batch with fewer is dropped.
            merge: Makes the batch of the samples.
        """
        thread_randomness.keyed = KeyedGenerators(Keys(*self._keys, [self._read]), COLLATION)
        before, self._read = self._read, self._read + wanted  # the rank counts as many where this raises
        data: list[Any] = []
        ended: StreamEnd | None = None
        while len(data) < wanted and ended is None:
            try:  # no `for`, which calls `iter` on it again: some iterators then begin at the beginning
                data.append(next(self._samples))
            except StopIteration:
                other = None if before or data else next(self._fallbacks, None)
                if other is None:
                    ended = self.end()  # an iterator that has ended is not asked again
                else:
                    self._begin(other)
        if ended is not None and (not data or drop_last):
            return ended
        batch = merge(data)
        self._read = before + len(data)
        if self._checksum is None:
            return Portion(len(data), batch, StreamPlace(_state_of(self._of_dataset), _state_of(self._of_iterator)))
        self._checksum = checksum(batch, self._checksum)
        return Portion(len(data), batch, StreamPlace(checksum=self._checksum))

    def reread_differs(self) -> bool:
        """Tell, once, whether the samples that were read again differ from those delivered before."""
        expected, self._expected = self._expected, None
        return expected is not None and expected != self._checksum


def _restored(dataset: Any, start: StreamStart) -> Iterator[Any]:
    """Return a dataset's iterator, after the saved states of both have been loaded.

    The dataset's state is loaded before `iter()`, since the iterator may begin where that state says. The iterator's
    state is loaded after `iter()`, since a dataset that is its own iterator mostly resets itself in `__iter__`.
    """
    place = start.place
    if place.of_dataset is not None:
        try:
            dataset.load_state_dict(place.of_dataset)
        except AttributeError:  # the state is of an object that its `__iter__` creates
            iter(dataset)
            dataset.load_state_dict(place.of_dataset)
    samples: Any = iter(dataset)
    if place.of_iterator is not None:
        samples.load_state_dict(place.of_iterator)
    elif samples is dataset and start.batches and place.of_dataset is not None:  # in states of older releases
        samples.load_state_dict(place.of_dataset)
    return samples  # type: ignore[no-any-return]


def _other_beginnings(dataset: Any, before: list[Any]) -> Iterator[Iterator[Any]]:
    """Yield further iterators for a pass that began with the state between two passes, and yielded nothing.

    Some datasets take the state that they had at their end for the end of the pass that begins with it. The pass after
    that begins at the beginning; where it does not, the dataset gets back the state that it had before.
    """
    yield iter(dataset)
    for state in before:
        dataset.load_state_dict(state)
        yield iter(dataset)


def _states_before(dataset: Any) -> list[Any]:
    """Return a list of a copy of a dataset's state, also before its first pass; an empty list if it has none then."""
    try:
        return [_state_of(dataset)]
    except Exception:  # noqa: BLE001 - the state may be of an object that its `__iter__` creates
        return []


def state_between(dataset: Any) -> Any:
    """Return a copy of the state of a dataset between two passes, or before the first; None if it has none then."""
    return next(iter(_states_before(dataset)), None)


def has_state(one: Any) -> bool:
    """Tell whether an object keeps a state of its own, under the names that torch uses, from which it can go on."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(one, name, None)) for name in names) and not _loses_samples(one)


_INEXACT = "BufferShuffledExamplesIterable"
"""The step of a stream of Hugging Face's datasets whose state has no samples: those in its buffer would be lost."""


def _loses_samples(dataset: Any) -> bool:
    """Tell whether a dataset goes on from its own state without the samples that were in a shuffle buffer."""
    if all(kind.__module__.partition(".")[0] != "datasets" for kind in type(dataset).__mro__):
        return False
    steps = [getattr(dataset, "_ex_iterable", None)]
    for step in steps:
        if type(step).__name__ == _INEXACT:
            return True
        steps += [*getattr(step, "ex_iterables", ()), *filter(None, [getattr(step, "ex_iterable", None)])]
    return False


def _state_of(stateful: Any) -> Any:
    return None if stateful is None else copy.deepcopy(stateful.state_dict())
