"""The rank's sockets to workers on its own host, and the selector that waits for them and for events."""

import selectors
from collections.abc import Callable, Sequence
from typing import Any

from headrace.executors.link.lending import Lender
from headrace.executors.link.wire import Wire
from headrace.executors.ray.events import EventQueue
from headrace.executors.ray.listener import Listener
from headrace.executors.ray.peer import RayFuture, RayPeer
from headrace.memory.slots import Mapping


class Connections:
    """The sockets of one pool.

    Args:
        events: The pool's events. A new event ends a wait, too.
        shared_memory: Whether there is a listener, to which workers on the rank's own host connect in order to send
            batches in shared memory. Without it Ray carries all batches.
        set_up: Called with each worker whose sockets are connected.

    Attributes:
        address: The listener's name; "" if there is none.
        pin: Called with each slot that is mapped, if it is not None.
    """

    def __init__(self, events: EventQueue, shared_memory: bool, set_up: Callable[[RayPeer], None]) -> None:
        self._set_up = set_up
        self._listener = Listener(shared_memory)
        self.address = self._listener.address
        self.pin: Callable[[Mapping], None] | None = None
        self._lender = Lender()
        self._wires: list[Wire] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(events.end, selectors.EVENT_READ, events)
        if self._listener.listener is not None:
            self._selector.register(self._listener.listener, selectors.EVENT_READ, self._listener)

    def wait(self, peers: Sequence[RayPeer], timeout_s: float) -> list[tuple[Any, int]]:
        """Wait until a socket is ready.

        Returns:
            For each ready socket its `RayPeer`, `Listener` or `EventQueue`, and the selector's flags.
        """
        for peer in peers:
            if peer.wire is not None and peer.awaits_writable != bool(peer.wire.outbox):
                flags = selectors.EVENT_READ | (0 if peer.awaits_writable else selectors.EVENT_WRITE)
                self._selector.modify(peer.wire.end, flags, peer)
                peer.awaits_writable = not peer.awaits_writable
        return [(key.data, flags) for key, flags in self._selector.select(timeout_s)]

    def connect(self, peer: RayPeer) -> None:
        """Use the sockets to a worker as soon as it is set up and both are connected."""
        ends = self._listener.pair(peer.ident) if peer.setup_result is not None and peer.wire is None else None
        if ends is not None:
            peer.wire = Wire(*ends, peer.receive_answer)
            peer.wire.loans.pin = self.pin
            self._selector.register(peer.wire.end, selectors.EVENT_READ, peer)
            self._wires.append(peer.wire)
            self._set_up(peer)

    def disconnect(self, peer: RayPeer) -> None:
        """Close the sockets to a worker."""
        wire, peer.wire = peer.wire, None
        if wire is not None:
            self._selector.unregister(wire.end)
            self._wires.remove(wire)
            wire.close()
        self._listener.disconnect(peer.ident)

    def send(self, peer: RayPeer, wire: Wire, futures: Sequence[RayFuture]) -> None:
        """Send a worker tasks in one message, along with the slots that it may use again."""
        wire.hand(futures, self._lender.lend(wire, len(peer.unanswered), self._wires, len(futures)))

    def limit_slots(self, limit: Callable[[], int]) -> None:
        """Keep no spare slots where those that are mapped exceed a limit."""
        self._lender.limit = limit

    def slot_sizes(self) -> list[int]:
        """Return the sizes of the slots that are mapped, in bytes."""
        return [size for wire in self._wires for size in wire.loans.sizes()]

    def close(self) -> None:
        """Stop listening and waiting. All workers must be disconnected."""
        self._selector.close()
        self._listener.close()
