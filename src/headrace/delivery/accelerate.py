"""Hugging Face Accelerate's bookkeeping, kept by a loader that Accelerate hands back as it is.

Accelerate asks each loader whether it is prepared already (`_is_accelerate_prepared`). One that splits the
data itself says yes, and then owes what Accelerate's own wrapper would do: announce itself while it is
iterated, mark the last batch, say how many samples of that are no pads, and put batches on the device.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.delivery.reader import Observer
from headrace.interrupts import Droppable, InterruptsHeld


class AccelerateLink(Observer):
    """Ties one pass of a loader to the Accelerate state of this process.

    Args:
        loader: Gets the attributes `end_of_dataloader` and `remainder`, which Accelerate reads.
        steps: Counts the batches of the pass; -1 where nobody knows.
        remainder: Samples of the last global batch that are no pads; 0 for all, -1 for unknown.
    """

    def __init__(self, loader: Any, steps: Callable[[], int], remainder: int) -> None:
        accelerate = sys.modules["accelerate"]
        self._gradient_state: Any = accelerate.state.GradientState()
        self._device = accelerate.PartialState().device
        self._send = accelerate.utils.send_to_device
        self._loader = weakref.ref(loader)  # the loader may hold the reader that holds this
        self._steps, self._remainder = steps, remainder
        self._announced = False

    def delivering(self, nth: int, number: int, worker: int, samples: int, resume: Any) -> None:
        """Announce the loader at its first batch, and mark its last."""
        self.announce()
        if nth == self._steps():
            self.last()

    def announce(self) -> None:
        """Let Accelerate know that the loader is being read."""
        loader = self._loader()
        if loader is not None and not self._announced:
            self._announced = True
            loader.end_of_dataloader, loader.remainder = False, self._remainder
            self._gradient_state._add_dataloader(loader)

    def last(self) -> None:
        """Mark the batch about to be delivered as the last."""
        loader = self._loader()
        if loader is not None:
            loader.end_of_dataloader = True

    def ended(self, finished: bool) -> None:
        """Withdraw the loader; Accelerate forgets by itself one that is gone."""
        loader = self._loader()
        if loader is not None and self._announced:
            self._announced = False
            self._gradient_state._remove_dataloader(loader)

    def to_device(self, batch: Any) -> Any:
        """Put a batch on Accelerate's device."""
        return self._send(batch, self._device)


class Told(Observer):
    """Keeps what a reader tells, for another to pass on."""

    def __init__(self) -> None:
        self.all: list[tuple[int, int, int, int, Any]] = []

    def delivering(self, nth: int, number: int, worker: int, samples: int, resume: Any) -> None:
        """Keep it."""
        self.all.append((nth, number, worker, samples, resume))


class OneAhead(Droppable, Iterator[Any]):
    """Holds one batch back, to know the last of a stream whose length nobody knows; and what is told of it.

    It tells the link and the observers itself, since the reader is at its end a batch before the user is.

    Args:
        link: Accelerate's books.
        observers: Told of a batch when the user gets it.

    Attributes:
        reader: Whose batches it hands out.
        told: What the reader tells; an object of its own, lest the two hold each other.
    """

    reader: Iterator[Any]

    def __init__(self, link: AccelerateLink, observers: Sequence[Observer]) -> None:
        self._link, self._observers = link, observers
        self._held: list[Any] = []
        self.told = Told()

    def __next__(self) -> Any:
        last = False
        while len(self._held) < 2 and not last:
            try:
                self._held.append(next(self.reader))
            except StopIteration:
                last = True
        if not self._held:
            self._end(finished=True)
            raise StopIteration
        self._link.announce()
        if last:
            self._link.last()
        batch = self._held.pop(0)
        told = self.told.all
        while len(told) > len(self._held):  # of the batch, and of errors that were raised in others' places
            for observer in self._observers:
                observer.delivering(*told[0])
            del told[0]
        return batch

    def _end(self, finished: bool) -> None:
        for observer in (self._link, *self._observers):
            observer.ended(finished)

    def _dropped(self) -> None:
        with InterruptsHeld():
            self._end(finished=False)


def in_use() -> bool:
    """Tell whether this process has an Accelerate state; without one nobody keeps its books."""
    accelerate = sys.modules.get("accelerate")
    return accelerate is not None and accelerate.state.PartialState._shared_state != {}


class Prepared:
    """What Accelerate looks for in a loader, under its names; a part of the loader.

    Attributes:
        end_of_dataloader: Whether the batch handed out last is the last of the pass.
        remainder: Samples of the last global batch that are no pads; 0 for all, -1 for unknown.
    """

    _accelerated = False
    end_of_dataloader = False
    remainder = -1

    @property
    def _is_accelerate_prepared(self: Any) -> bool:
        """Accelerate asks this in `prepare`: a loader that splits the data by itself is handed back as it is."""
        if self._user_order or (self._iterable and not self._schedule.splits_stream()):
            return False
        if in_use():
            self._is_accelerate_prepared = True  # asked by `prepare_data_loader` alone, it would not come back to say
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self: Any, prepared: bool) -> None:
        self._accelerated = self._schedule.pads_last = prepared

    @property
    def total_batch_size(self: Any) -> int:
        """Samples per step over all ranks, under the name that Accelerate uses."""
        size: int = self._schedule.world().size
        return (self.batch_size or 1) * size

    @property
    def total_dataset_length(self: Any) -> int:
        """Samples in the dataset, under the name that Accelerate uses."""
        return len(self.dataset)

    def _link(self, steps: Callable[[], int], remainder: int) -> AccelerateLink | None:
        return AccelerateLink(self, steps, remainder) if self._accelerated else None
