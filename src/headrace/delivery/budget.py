"""`Budget`: how much memory, and how many CPUs, loaders may use for batches that nobody has received yet."""

from collections import deque
from typing import Any

from headrace.errors import whole_number
from headrace.system.interrupts import Living

_RECENT = 128
"""The number of recent batches of which the largest counts."""

_SLOT_GROWTH = 9 / 8
"""How much larger a slot of shared memory may be than the batches that it is made for."""


class Budget:
    """A limit on what a rank's loaders compute ahead, for one loader or several: training and evaluation, for example.

    Each loader that has workers and was iterated may use an equal part of the bytes. How large a batch will be is known
    only when it is there, so a batch that was asked for counts as much as the largest of the last 128. The first one is
    asked for alone; when n batches have come that n could be asked for, it is n + 1, as far as the bytes allow. One
    batch is always allowed.

    Args:
        max_bytes: Bytes of batches that were asked for, until the next one is delivered, of all loaders together, >= 1.
        cpus: How many batches of all loaders together are computed at a time, >= 1; None for no limit. Of a loader that
            is not being read, what it has asked for before does not count. One batch is always allowed.

    Raises:
        TypeError: An argument is no integer.
        ValueError: An argument is < 1.

    Example:
        >>> budget = Budget(4 * 2**30, cpus=8)
        >>> train = DataLoader(train_set, 64, num_workers=8, max_prefetch_bytes=budget)
        >>> evaluation = DataLoader(test_set, 256, num_workers=8, max_prefetch_bytes=budget)
    """

    def __init__(self, max_bytes: int, cpus: int | None = None) -> None:
        self.max_bytes = whole_number("max_bytes", max_bytes, low=1, fix="Leave it out for no limit.")
        self.cpus = None if cpus is None else whole_number("cpus", cpus, low=1, fix="Leave it out for no limit.")
        self._shares = Living[Share]()
        self._turn = 0

    def __repr__(self) -> str:
        return f"Budget({self.max_bytes}{'' if self.cpus is None else f', cpus={self.cpus}'})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Budget, (self.max_bytes, self.cpus)  # in another process it is for the loaders there

    def __deepcopy__(self, memo: Any) -> "Budget":
        return self  # copied loaders share it, too

    def share(self) -> "Share":
        """Return the part of one more loader."""
        share = Share(self)
        self._shares.add(share)
        return share

    def part_bytes(self) -> int:
        """Return the bytes that each loader may use."""
        return self.max_bytes // max(1, sum(1 for _ in self._shares))

    def take_turn(self, share: "Share") -> int:
        """Count the batches that other loaders compute, of those that have asked since this one did."""
        before, share.turn = share.turn, self._turn
        self._turn += 1
        return sum(other.computing for other in self._shares if other is not share and other.turn >= before)


class Share:
    """One loader's part of a budget. Other loaders, perhaps in other threads, only read its numbers.

    Args:
        budget: The budget.

    Attributes:
        computing: How many batches the loader computed when it last asked.
        turn: When that was, as the budget counts.
        windows: What asks for its batches: one for each reader.
    """

    def __init__(self, budget: Budget) -> None:
        self.computing = 0
        self.turn = 0
        self.windows = Living[Any]()
        self._budget = budget
        self._sizes: deque[int] = deque(maxlen=_RECENT)
        self._most, self._since = 1, 0  # how many batches may be asked for, and how many have come since

    def note(self, size: int) -> None:
        """Note the size of a batch that has come, in bytes."""
        self._sizes.append(size)
        self._since += 1
        if self._since == self._most:
            self._most, self._since = self._most + 1, 0

    def most_mapped(self) -> int:
        """Return how many bytes may be mapped for batches: the loader's part, and one more that may be larger."""
        return self._budget.part_bytes() + int(max(self._sizes, default=0) * _SLOT_GROWTH)

    def room(self, wanted: int, asked: int, computing: int) -> tuple[int, bool]:
        """Count the batches that may be asked for now; tell also whether bytes or CPUs allow fewer than are wanted.

        Args:
            wanted: How many would be asked for without a budget.
            asked: How many were asked for and not delivered.
            computing: How many of them are not there yet.
        """
        budget, fit = self._budget, 1
        if self._sizes:
            # The user has one more, which was delivered.
            fit = max(1, int(budget.part_bytes() / (max(1, *self._sizes) * _SLOT_GROWTH)) - 1)
        room, limited = min(wanted, fit - asked, self._most - asked), bool(self._sizes) and fit - asked < wanted
        if budget.cpus is not None:
            free = max(budget.cpus - computing - budget.take_turn(self), 1 - computing)
            room, limited = min(room, free), limited or free < wanted
            self.computing = computing + max(0, room)
        return max(0, room), limited
