"""The rank's listener for workers on its own host: a Unix socket without a file, for processes of the same user."""

import os
import socket
import struct
import sys
from contextlib import suppress
from secrets import token_hex

from headrace.executors.ray.actor import HELLO

_CREDENTIALS = struct.Struct("3i")
"""The process, user and group at the other end, as the kernel reports them."""

_ROOT = 0
"""The user that may act for any other."""

_HELLO_S = 1.0
"""Time limit for the first message of a connection, in seconds; the worker sends it at once."""


class Listener:
    """The rank's listening socket.

    Args:
        opens: Whether to listen; only on Linux, which has sockets without a file.

    Attributes:
        address: Its name; "" if there is none.
        listener: The socket, for a selector.
    """

    def __init__(self, opens: bool) -> None:
        self.address, self.listener = "", None
        self._arrived: dict[int, dict[int, socket.socket]] = {}
        if opens and sys.platform.startswith("linux"):
            self.address = f"\0headrace-{token_hex(16)}"
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(self.address)
            self.listener.listen(128)
            self.listener.setblocking(False)

    def accept(self) -> None:
        """Accept a connection; close it if it comes from another user or does not identify itself."""
        assert self.listener is not None
        with suppress(OSError):
            arrived, _ = self.listener.accept()
            arrived.settimeout(_HELLO_S)
            try:
                raw = arrived.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                hello = arrived.recv(HELLO.size) if _CREDENTIALS.unpack(raw)[1] in (os.getuid(), _ROOT) else b""
                ident, which = HELLO.unpack(hello)
            except (OSError, struct.error):
                arrived.close()
                return
            arrived.settimeout(None)
            self._arrived.setdefault(ident, {})[which] = arrived

    def pair(self, ident: int) -> tuple[socket.socket, socket.socket] | None:
        """Return a worker's two sockets, for messages and for descriptors, once both are there."""
        if len(self._arrived.get(ident, ())) < 2:
            return None
        ends = self._arrived.pop(ident)
        return ends[0], ends[1]

    def disconnect(self, ident: int) -> None:
        """Close the connections of a worker that is not needed any more."""
        for end in self._arrived.pop(ident, {}).values():
            end.close()

    def close(self) -> None:
        """Stop listening, and close the connections that no worker has claimed."""
        for ident in list(self._arrived):
            self.disconnect(ident)
        if self.listener is not None:
            self.listener.close()
