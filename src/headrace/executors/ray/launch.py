"""The class that Ray's actors are made of: it imports the worker, and with it torch, as fast as it can."""

import functools
import gc
import importlib
from typing import Any


@functools.cache
def actor_class() -> type:
    """Return the class of all actors.

    Ray sends it by value, since it is defined in a function. An actor therefore runs its first line before it imports
    anything of headrace, which imports torch. The annotations name nothing of headrace for the same reason.
    """

    class Actor:
        """A process that is a worker of one pool after another; see `headrace.executors.ray.actor.Actor`."""

        def __init__(self) -> None:
            # Imports make many objects that stay. The garbage collector would visit them again and again, and take a
            # fifth of the time. `set_up` enables it.
            gc.disable()
            self._error: Exception | None = None
            try:
                self._worker: Any = importlib.import_module("headrace.executors.ray.actor").Actor()
            except Exception as error:  # noqa: BLE001 - `set_up` raises it; an actor that ended would only be replaced
                self._error = error
            gc.freeze()

        def ready(self) -> None:
            """Return as soon as the actor has started."""

        def set_up(self, setup: Any, parts: Any) -> Any:
            """Become a worker."""
            if self._error is not None:
                raise self._error
            return self._worker.set_up(setup, parts)

        def serve(self) -> None:
            """Answer tasks over the socket."""
            self._worker.serve()

        def run(self, request: bytes) -> Any:
            """Answer tasks through Ray."""
            return self._worker.run(request)

    return Actor
