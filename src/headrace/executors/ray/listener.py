"""Where workers on the rank's own host come in: a Unix socket without a file, for processes of the same user alone."""

import os
import socket
import struct
import sys
from contextlib import suppress
from secrets import token_hex

from headrace.executors.ray.actor import HELLO

_CREDENTIALS = struct.Struct("3i")
"""The process, user and group at the other end, as the kernel has them."""

_ROOT = 0
"""The user who may do as all others."""

_HELLO_S = 1.0
"""How long a first message may take that was sent when the connection was made."""


class Door:
    """The rank's listening socket.

    Args:
        opens: Whether there is to be one; there is none where the system has no sockets without a file.

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
        """Take a connection in; strangers, and who does not say who it is, are sent away."""
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

    def send_away(self, ident: int) -> None:
        """Hang up on a worker that is not wanted any more."""
        for end in self._arrived.pop(ident, {}).values():
            end.close()

    def close(self) -> None:
        """Let nobody in any more."""
        for ident in list(self._arrived):
            self.send_away(ident)
        if self.listener is not None:
            self.listener.close()
