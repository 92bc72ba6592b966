"""The class that Ray's actors are made of: it imports the worker, and with it torch, as fast as it can."""

import functools
import gc
import importlib
from contextlib import suppress
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
            # An actor that ended would only be replaced. The arguments of `set_up` raise the error again.
            with suppress(Exception):
                self._worker: Any = importlib.import_module("headrace.executors.ray.actor").Actor()
            gc.freeze()

        def ready(self) -> None:
            """Return as soon as the actor has started."""

        def set_up(self, setup: Any, parts: Any) -> Any:
            """Become a worker."""
            return self._worker.set_up(setup, parts)

        def serve(self) -> None:
            """Answer tasks over the socket."""
            self._worker.serve()

        def run(self, request: bytes) -> Any:
            """Answer tasks through Ray."""
            return self._worker.run(request)

    return Actor
