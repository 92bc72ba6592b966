"""Figures about a loader, for its user: counted while it runs, handed out as frozen values."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """What a loader has done since it was made, over all its epochs and readers.

    Attributes:
        batches: Batches handed to the caller.
        samples: Samples in them.
        received_bytes: What came from workers in other processes, in bytes; 0 where nothing crosses a border.
        wait_s: Time the caller spent inside `next()`, in seconds: with workers, waiting for them.
        elapsed_s: Time from the first `next()` of each pass to its last, in seconds: training and waiting.
        restarts: How often workers were replaced because one of them had died.
        slots: Shared memory slots that are mapped now.
        slot_bytes: Their size, in bytes.
    """

    batches: int = 0
    samples: int = 0
    received_bytes: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0
    restarts: int = 0
    slots: int = 0
    slot_bytes: int = 0

    @property
    def wait_percent(self) -> float:
        """The share of the elapsed time that the caller waited, in per cent; 0 before the first batch."""
        return 100 * self.wait_s / self.elapsed_s if self.elapsed_s else 0.0


@dataclass
class Meter:
    """The counts behind `Stats`, under the same names; readers add to it at every batch."""

    batches: int = 0
    samples: int = 0
    received_bytes: int = 0
    wait_s: float = 0.0
    elapsed_s: float = 0.0
    restarts: int = 0

    def read(self, slots: int, slot_bytes: int) -> Stats:
        """Return the figures as they are now."""
        return Stats(**vars(self), slots=slots, slot_bytes=slot_bytes)
