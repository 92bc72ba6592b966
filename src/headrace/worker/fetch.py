"""Fetching the samples of a batch: one after another, in one call, or several at a time; and replacing broken ones."""

import reprlib
import textwrap
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import thread_time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, StackDataset, Subset

from headrace.errors import note
from headrace.plan.keys import Words, sample_seeds, sample_words
from headrace.randomness import Generators, KeyedGenerators, Keys, thread_randomness, wait_for_all
from headrace.system.torch_threads import begin_with_torch_threads
from headrace.telemetry.stages import DECODE, READ, StageClock
from headrace.types import Remark, Replaced
from headrace.worker.pairs import Pair, WrongCount, pair_of
from headrace.worker.seeding import Seeder

Substitutes = Callable[[int, int], Sequence[int]]
"""Returns the indices to try instead of a sample that cannot be fetched, given its epoch and position."""

_ERROR_CHARACTERS = 300
"""How many characters of an error are recorded: its text may hold the whole sample."""


class _Batch:
    """A batch that is being fetched.

    Attributes:
        indices: The dataset's indices.
        keys: Key the samples' randomness.
        seeded: Whether the process's generators are seeded before each sample.
        step: The plan's step; None without a plan.
        pair: How the dataset reads and decodes; None where it is asked for whole samples.
        raws: The raw samples, if they were read in one call; None where each is read alone.
        samples: The samples, None where they are still to be fetched.
        replaced: The substitutions, by place in the batch.
    """

    __slots__ = ("indices", "keys", "pair", "raws", "replaced", "samples", "seeded", "step")

    def __init__(self, indices: list[Any], keys: Keys, seeded: bool, step: int | None, pair: Pair | None) -> None:
        self.indices, self.keys, self.seeded, self.step, self.pair = indices, keys, seeded, step, pair
        self.raws: Sequence[Any] | None = None
        self.samples: list[Any] = [None] * len(indices)
        self.replaced: dict[int, Replaced] = {}


class _Lookup:
    """Calls a function by subscript: the line that asks a dataset for a sample then decodes raw samples, too."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, item: Any) -> Any:
        return self._function(item)


class Fetcher:
    """Fetches from a map-style dataset.

    If a dataset can be asked in several ways, `read_many` and `decode` come first, then a `__getitems__` that a user
    wrote, then `__getitem__`. An index that is a list, without batching, is for `__getitem__` alone, as in torch.

    Args:
        dataset: The dataset.
        batched: Whether a task is a list of indices.
        keyed: Whether each sample has random numbers of its own, rather than torch's, draw by draw.
        threads: How many samples to fetch at a time.
        shared: Whether other workers draw from the same process's generators at the same time.
        remarks: Gets the remarks for the user.
        clock: Measures reading and decoding.
        seeder: Seeds the process's generators.
        substitutes: Tells what replaces a sample that cannot be fetched; None where errors are raised.

    Attributes:
        stage: The stage that ends with the last sample: of a dataset that is read by the batch it is decoding.
    """

    def __init__(
        self,
        dataset: Any,
        batched: bool,
        keyed: bool,
        threads: int,
        shared: bool,
        remarks: list[Remark],
        clock: StageClock,
        seeder: Seeder,
        substitutes: Substitutes | None = None,
    ) -> None:
        self._dataset = dataset
        self._shared = shared
        self._remarks = remarks
        self._clock = clock
        self._seeder = seeder
        self._substitutes = substitutes
        self._batched = batched
        self._threads = threads if batched else 1
        # Torch's own wrappers have a bulk call that only passes on; sample by sample each keeps its own randomness.
        through = keyed or threads > 1
        self._pair = pair_of(dataset, by_part=batched and not through)
        self.stage = READ if self._pair is None else DECODE
        self._in_bulk = (
            batched
            and self._pair is None
            and bool(_asks_in_bulk(dataset) if through else getattr(dataset, "__getitems__", None))
        )
        self._pool: ThreadPoolExecutor | None = None

    def fetch(self, indices: Any, keys: Keys, seeded: bool, step: int | None = None) -> Sequence[Any]:
        """Return the samples at the indices, in their order.

        Args:
            indices: The dataset's indices.
            keys: Key the samples' randomness.
            seeded: Whether to seed the process's generators for each sample, or for all if they come in one call.
            step: The plan's step, whose samples have positions; None without a plan.
        """
        thread_randomness.keyed = keyed = KeyedGenerators(keys, 0)
        if self._in_bulk:
            return self._bulk(indices, keyed, seeded, step)
        indices, pair = list(indices), self._pair
        if not self._batched and type(indices[0]) is list:
            pair = None
        batch = _Batch(indices, keys, seeded, step, pair)
        # Where generators are shared a batch is seeded only after it was seen to draw: then one by one.
        if self._threads > 1 and len(indices) > 1 and not (self._shared and seeded):
            before = Generators() if pair is not None and not (self._shared or seeded) else None
            self._read(batch, keyed)
            if self._several(batch):
                return batch.samples
            if before is not None:
                before.restore()
        if pair is not None:
            self._read(batch, keyed)  # perhaps again: decoding may have changed the raw samples
        return self._one_by_one(batch, keyed)

    def _bulk(self, indices: Any, keyed: KeyedGenerators, seeded: bool, step: int | None) -> Sequence[Any]:
        if seeded:
            self._seeder.seed(_seed_of(keyed.keys, keyed.keys.numbers[0]))
        try:
            samples: Sequence[Any] = self._dataset.__getitems__(indices)
        except Exception as error:
            self._note_on_batch(error, indices, keyed.keys, step)
            if not self._replaces(error) or not fetches_singly(self._dataset):
                raise
            keyed.restart()
            # Only one by one shows which sample is the broken one.
            return self._one_by_one(_Batch(list(indices), keyed.keys, seeded, step, None), keyed)
        return samples

    def _read(self, batch: _Batch, keyed: KeyedGenerators) -> None:
        """Read all raw samples in one call, if the dataset can; what it draws has the first sample's random numbers."""
        if batch.pair is None or not batch.indices:
            return
        batch.raws = None
        if batch.seeded:
            self._seeder.seed(_seed_of(batch.keys, batch.keys.numbers[0]))
        try:
            batch.raws = batch.pair.read(batch.indices)
        except Exception as error:
            self._note_on_batch(error, batch.indices, batch.keys, batch.step)
            if not self._replaces(error):
                raise
        keyed.restart()
        self._clock.lap(READ)

    def _note_on_batch(self, error: Exception, indices: Any, keys: Keys, step: int | None) -> None:
        note(error, f"while fetching samples {reprlib.repr(indices)}{_position(keys, 0, step)}")

    def _one_by_one(self, batch: _Batch, keyed: KeyedGenerators) -> list[Any]:
        try:
            self._fill(batch, range(len(batch.indices)), keyed)
        finally:
            if batch.replaced:
                self._remarks.extend(batch.replaced.values())
        return batch.samples

    def _fill(self, batch: _Batch, places: Iterable[int], keyed: KeyedGenerators) -> None:
        """Fetch the samples at some places of a batch, and replace those that cannot be fetched."""
        keys, step, indices, samples = batch.keys, batch.step, batch.indices, batch.samples
        seed, seeds = self._seeder.each(_words(keys, len(indices))) if batch.seeded else (None, [])
        source: Any = self._dataset
        items: Sequence[Any] = indices
        if batch.pair is not None and batch.raws is not None:
            source, items = _Lookup(batch.pair.decode), batch.raws
        elif batch.pair is not None:
            source = _Lookup(lambda index: self._single(index, keyed, seed and partial(seed, seeds[keyed.place])))
        for place in places:
            if seed is not None:
                seed(seeds[place])
            keyed.place = place
            try:
                samples[place] = source[items[place]]
            except Exception as error:
                index = indices[place]
                note(error, f"while fetching sample {index!r}{_position(keys, place, step)}")
                if step is None or not self._replaces(error):
                    raise
                instead = self._instead(error, keyed, batch.seeded)
                if instead is None:
                    raise
                substitute, samples[place] = instead
                position = keys.numbers[place]
                batch.replaced[place] = Replaced(keys.epoch, step, position, index, substitute, _in_one_line(error))

    def _single(self, index: Any, keyed: KeyedGenerators, seed: Callable[[], None] | None) -> Any:
        """Fetch one sample; `seed` has been called for it, if it is not None."""
        if self._pair is None:
            return self._dataset[index]
        (raw,) = self._pair.read([index])
        keyed.restart()  # decoding has the same random numbers whether or not reading draws
        if seed is not None:
            seed()
        return self._pair.decode(raw)

    def _instead(self, error: Exception, keyed: KeyedGenerators, seeded: bool) -> tuple[int, Any] | None:
        """Return the index and the sample that replace a broken one; None, and a note, if all substitutes fail."""
        assert self._substitutes is not None
        keys = keyed.keys
        position = keys.numbers[keyed.place]
        substitutes = self._substitutes(keys.epoch, position)
        # Substitutes have the random numbers of the position.
        seed = partial(self._seeder.seed, _seed_of(keys, position)) if seeded else None
        for substitute in substitutes:
            keyed.restart()
            if seed is not None:
                seed()
            try:
                return substitute, self._single(substitute, keyed, seed)
            except Exception as another:
                if not self._replaces(another):
                    note(another, f"while fetching sample {substitute} as a substitute")
                    raise
        note(error, f"{len(substitutes)} substitutes failed too: samples {substitutes}")
        return None

    def _replaces(self, error: Exception) -> bool:
        """Tell whether a sample that raised an error is to be replaced. Lack of memory is not the sample's fault."""
        return self._substitutes is not None and not isinstance(error, MemoryError | WrongCount)

    def _several(self, batch: _Batch) -> bool:
        """Fetch samples in threads, and return whether the result may be used.

        It may not be used if a sample drew from a global generator, since its numbers then depend on the order of the
        threads. The generators are restored in that case.
        """
        before = None if self._shared else Generators()
        unseeded = _Batch(batch.indices, batch.keys, False, batch.step, batch.pair)
        unseeded.raws = batch.raws
        errors = self._fill_in_threads(unseeded)
        moved = before.moved() if before is not None else []
        if before is not None and moved:
            before.restore()
            self._threads = 1
            outcome = "this worker fetches one sample at a time from now on"
            self._remarks.append(drawing_remark(moved, "fetch_threads", outcome))
            return False
        # As if fetched in order: all samples before an error were begun before it, and those behind it were not.
        end = min(errors, default=len(batch.indices))
        self._remarks.extend(unseeded.replaced[place] for place in sorted(unseeded.replaced) if place < end)
        batch.samples = unseeded.samples
        if errors:
            first = errors[end]
            errors.clear()
            try:
                raise first
            finally:
                del first  # it refers to this frame, which refers to it
        return True

    def _fill_in_threads(self, batch: _Batch) -> dict[int, BaseException]:
        """Fetch the samples of a batch in threads, until one fails; return the errors, by place in the batch."""
        errors: dict[int, BaseException] = {}
        cpu_s: list[float] = []
        places = deque(range(len(batch.indices)))
        lease = thread_randomness.lease

        def left() -> Iterator[int]:
            while places and not errors:
                try:
                    yield places.popleft()
                except IndexError:  # another thread took the last one
                    return

        def work() -> None:
            began_cpu_s = thread_time()
            thread_randomness.keyed = keyed = KeyedGenerators(batch.keys, 0)
            thread_randomness.lease = lease
            try:
                self._fill(batch, left(), keyed)
            except BaseException as error:  # noqa: BLE001 - the caller raises the first
                errors[keyed.place] = error
            finally:
                thread_randomness.keyed = thread_randomness.lease = None
                cpu_s.append(thread_time() - began_cpu_s)

        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                self._threads, "headrace-fetch", begin_with_torch_threads, (torch.get_num_threads(),)
            )
        try:
            wait_for_all([self._pool.submit(work) for _ in range(min(self._threads, len(batch.indices)))])
        finally:
            places.clear()  # interrupted: nothing more is begun
        self._clock.add_cpu(self.stage, sum(cpu_s))
        return errors


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


def _words(keys: Keys, count: int) -> Words:
    return sample_words(keys.seed, keys.epoch, np.asarray(keys.numbers[:count])) if keys.words is None else keys.words


def _seed_of(keys: Keys, number: int) -> Sequence[int]:
    return sample_seeds(keys.seed, keys.epoch, [number])[0]


def fetches_in_bulk(dataset: Any) -> bool:
    """Tell whether a batch is asked for by a `__getitems__` that a user wrote, looking through torch's own wrappers."""
    return pair_of(dataset) is None and _asks_in_bulk(dataset)


def _asks_in_bulk(dataset: Any) -> bool:
    dataset = _behind(dataset)
    bulk = getattr(type(dataset), "__getitems__", None)
    if bulk is Subset.__getitems__:
        return _asks_in_bulk(dataset.dataset)
    if bulk is StackDataset.__getitems__:
        parts = dataset.datasets
        return any(_asks_in_bulk(part) for part in (parts.values() if isinstance(parts, dict) else parts))
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
