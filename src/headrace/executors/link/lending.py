"""Which slots of shared memory go back to the workers of a pool, and which are dropped."""

from collections.abc import Callable, Sequence

from headrace.executors.link.wire import Loan, Wire

_SPARE_AFTER = 64
"""Tasks after which slots are dropped that none of them needed: they were for batches that the user held."""


class Lender:
    """Decides which slots go back to the workers of a pool, and which are dropped.

    Attributes:
        limit: Returns how many bytes of slots may be mapped before spare ones are dropped; None for no limit.
    """

    def __init__(self) -> None:
        self.limit: Callable[[], int] | None = None
        self._tasks = 0
        self._unneeded = 0  # slots that none of these tasks needed

    def lend(self, wire: Wire, tasks: int, wires: Sequence[Wire], new: int = 1) -> Loan:
        """Return the slots that go back to a worker with new tasks, and the slots that it is to forget.

        The pool has no more slots than batches that are asked for, undelivered or held, and one for each worker. A slot
        that one worker has to make therefore replaces a spare slot of another. That one spare slot for each worker
        stays: its turn comes when another worker's batch has just been dropped, and a new slot would cost new pages.
        Slots that nobody has needed for long are dropped, too.

        Args:
            wire: To the worker.
            tasks: How many tasks it has, the new ones included.
            wires: To all workers.
            new: How many tasks are new.
        """
        self._tasks += new
        back, dropped = wire.loans.lend(tasks, new)
        if self.limit is not None:
            self._drop_above(self.limit(), new - len(back), wires)
        spare = 0
        for one in wires:
            spare += len(one.loans.spare)
        self._unneeded = min(self._unneeded, spare)
        surplus = spare - len(wires)
        if surplus > 0:
            surplus = min(surplus, new - len(back), tasks - wire.loans.lent)
        if self._tasks >= _SPARE_AFTER:
            surplus = max(surplus, self._unneeded)
            self._tasks, self._unneeded = 0, spare - surplus
        while surplus > 0:
            max(wires, key=lambda one: len(one.loans.spare)).loans.drop()
            surplus -= 1
        return back, dropped

    def _drop_above(self, limit: int, coming: int, wires: Sequence[Wire]) -> None:
        """Drop spare slots above a limit in bytes.

        Those that workers may make count already: for tasks without a slot, and where a slot turns out too small.
        """
        sizes = [size for wire in wires for size in wire.loans.sizes()]
        coming += sum(wire.loans.lent for wire in wires)
        excess = sum(sizes) + coming * max(sizes, default=0) - limit
        while excess > 0 and (holding := [wire for wire in wires if wire.loans.spare]):
            excess -= max(holding, key=lambda wire: len(wire.loans.spare)).loans.drop()
