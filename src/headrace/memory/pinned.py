"""Page-locked shared memory: a slot is registered once with the driver, and batches in it need no further copy."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

from headrace.memory.slots import Mapping
from headrace.system.interrupts import Droppable


class Registrar(Protocol):
    """The calls of a driver that lock memory, and unlock it."""

    def register(self, address: int, size: int) -> None:
        """Lock memory, so that the device can read it directly.

        Args:
            address: The first address.
            size: The length in bytes.

        Raises:
            RuntimeError: The driver or the system refuses it.
        """

    def unregister(self, address: int) -> None:
        """Unlock memory that was registered. Copies from it must have ended."""


class CudaRegistrar:
    """The driver of CUDA or ROCm.

    Args:
        index: The device whose context makes the calls. The default device of another thread is another one, and would
            get a context of its own.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def register(self, address: int, size: int) -> None:
        """Lock memory.

        Raises:
            RuntimeError: The driver or the system refuses it.
        """
        with torch.cuda.device(self._index):
            try:
                torch.cuda.check_error(_runtime().cudaHostRegister(address, size, 0))
            except RuntimeError:
                with suppress(RuntimeError):  # the driver would report the error once more, at the next launch
                    torch.zeros(1, device="cuda")
                raise

    def unregister(self, address: int) -> None:
        """Unlock memory."""
        with torch.cuda.device(self._index):
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Pinning:
    """Registers mapped memory. After a refusal it registers nothing more.

    Args:
        registrar: The driver.
        warn: Called with the text of a warning when the driver has refused.
    """

    def __init__(self, registrar: Registrar, warn: Callable[[str], None]) -> None:
        self._registrar = registrar
        self._warn = warn
        self._refused = False

    def __call__(self, mapping: Mapping) -> None:
        """Register the memory of a mapping; it is unregistered before it is unmapped."""
        if self._refused:
            return
        try:
            self._registrar.register(mapping.address, mapping.size)
        except RuntimeError as error:
            self._refused = True
            self._warn(
                f"shared memory cannot be registered as pinned ({error}): batches are copied to pinned memory of "
                "torch's, as torch's own loader does. The limit of locked memory (ulimit -l) may be too low."
            )
            return
        mapping.pages = _RegisteredPages(mapping.pages, mapping.address, self._registrar)


class _RegisteredPages(Droppable):
    """Keeps memory mapped, and unregisters it before it is unmapped.

    Args:
        pages: What keeps it mapped.
        address: Its first address.
        registrar: The driver that it is registered with.
    """

    def __init__(self, pages: Any, address: int, registrar: Registrar) -> None:
        self._pages = pages
        self._address = address
        self._registrar = registrar
        self._owner = os.getpid()

    def _dropped(self) -> None:
        if os.getpid() == self._owner:  # a forked process must not use the driver
            self._registrar.unregister(self._address)
