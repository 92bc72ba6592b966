"""Idle actors between two pools: starting a process that imports torch takes seconds, so each is kept for a while."""

import functools
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headrace.executors.ray.cluster import import_ray, job_of

_END_S = 0.25
"""How long to wait for an actor to finish its call, in seconds: starting another takes longer."""


@dataclass(eq=False)
class _Idle:
    job: str
    options: Any
    actor: Any
    last_call: Any
    starting: bool
    until_s: float


class IdleActors:
    """Actors that no pool uses, kept for the next pool. An idle actor holds nothing of the pool that it served."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[_Idle] = []
        self._ending: deque[tuple[str, Any]] = deque()
        self._watched = False
        # The garbage collector may free a pool and its handles together, and an actor without a handle dies.
        self._handles: set[Any] = set()

    def take_or_start(self, ray: Any, kind: type, options: Any) -> tuple[Any, bool]:
        """Return an actor, an idle one if possible, and whether it was idle."""
        actor = self._take(ray, options)
        if actor is not None:
            return actor, True
        actor = ray.remote(kind).options(**options).remote()
        _register_fork_hook()
        self._handles.add(actor)
        return actor, False

    def keep(self, job: str, options: Any, actor: Any, last_call: Any, starting: bool, idle_s: float) -> None:
        """Keep an actor for a while after its last call is answered; then end it.

        Args:
            job: The rank's job, as `job_of` returns it.
            options: The options that it was started with.
            actor: The actor.
            last_call: Its last call.
            starting: Whether it is still starting, and will be up sooner than a new one.
            idle_s: How long to keep it, in seconds.
        """
        with self._changed:
            self._idle.append(_Idle(job, options, actor, last_call, starting, time.monotonic() + idle_s))
            self._wake_watcher()

    def end(self, job: str, actor: Any) -> None:
        """End an actor soon, in the watching thread.

        Ray needs one of its own threads to end an actor. The pool may be collected in that very thread.
        """
        self._ending.append((job, actor))
        with self._changed:
            self._wake_watcher()

    def clear(self) -> None:
        """End all idle actors now."""
        with self._changed:
            for one in self._idle:
                one.until_s = 0.0
            self._changed.notify_all()

    def _take(self, ray: Any, options: Any) -> Any:
        """Return an idle actor with these options, or None.

        In either case all idle actors with other options are ended first: the new ones may need their resources.
        """
        with self._changed:
            job = job_of(ray)
            others = [one for one in self._idle if one.job != job or one.options != options]
            self._idle = [one for one in self._idle if one not in others]
            for one in others:
                self.end(one.job, one.actor)
            calls = {one.last_call: one for one in self._idle}
            done = ray.wait(list(calls), timeout=0)[0] if calls else []
            starting = [call for call, one in calls.items() if one.starting and call not in done]
            if calls and not done and not starting:
                done = ray.wait(list(calls), timeout=_END_S)[0]
            for call in (*done, *starting):
                self._idle.remove(calls[call])
                return calls[call].actor
            return None

    def _wake_watcher(self) -> None:
        if not self._watched:
            self._watched = True
            threading.Thread(target=self._watch, name="ray-idle-actors", daemon=True).start()
        self._changed.notify_all()

    def _watch(self) -> None:
        ray = import_ray()
        while True:
            with self._changed:
                now_s = time.monotonic()
                for one in [one for one in self._idle if one.until_s <= now_s]:
                    self._idle.remove(one)
                    self._ending.append((one.job, one.actor))
                if not self._ending:
                    if not self._idle:
                        self._watched = False
                        return
                    self._changed.wait(min(one.until_s for one in self._idle) - now_s)
            while self._ending:
                job, actor = self._ending.popleft()
                self._handles.discard(actor)
                with suppress(Exception):  # the actor or its cluster has ended
                    if ray.is_initialized() and job_of(ray) == job:
                        ray.kill(actor)

    def reset_after_fork(self) -> None:
        """Start empty in a forked process. The handles are kept: dropping them would tell Ray to end the actors."""
        _inherited.append((self._handles, self._idle, self._ending))
        self.__init__()  # type: ignore[misc]


_inherited: list[Any] = []

IDLE_ACTORS = IdleActors()


@functools.cache
def _register_fork_hook() -> None:
    # Registered with the first actor only: processes without Ray fork without this hook.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=IDLE_ACTORS.reset_after_fork)
