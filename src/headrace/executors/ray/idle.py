"""Idle actors, before the first pool and between two: starting a process that imports torch takes seconds."""

import functools
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headrace.executors.ray.cluster import import_ray, job_of
from headrace.executors.ray.launch import actor_class

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
    """Actors that no pool uses, kept for the next pool. An idle actor holds nothing of a pool that it served."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[_Idle] = []
        self._ending: deque[tuple[str, Any]] = deque()
        self._watched = False
        # The garbage collector may free a pool and its handles together, and an actor without a handle dies.
        self._handles: set[Any] = set()
        self._class: tuple[str, Any] = ("", None)  # as Ray has it, and the job that it was sent for

    def take_or_start(self, ray: Any, options: Any) -> tuple[Any, bool]:
        """Return an actor, an idle one if possible, and whether it had already started."""
        with self._changed:
            job = self._end_others(ray, options)
            calls = {one.last_call: one for one in self._idle}
            done = ray.wait(list(calls), timeout=0)[0] if calls else []
            starting = [call for call, one in calls.items() if one.starting and call not in done]
            if calls and not done and not starting:
                done = ray.wait(list(calls), timeout=_END_S)[0]
            for call in (*done, *starting):
                self._idle.remove(calls[call])
                return calls[call].actor, call in done
            return self._start(ray, job, options), False

    def start(self, ray: Any, options: Any, count: int, keep_s: float) -> None:
        """Have at least `count` idle actors with these options: start those that are missing.

        Args:
            ray: The module, connected.
            options: Ray's options of each actor.
            count: The number of actors.
            keep_s: How long to keep them at least, in seconds.
        """
        with self._changed:
            job = self._end_others(ray, options)
            for _ in range(count - len(self._idle)):
                actor = self._start(ray, job, options)
                self._idle.append(_Idle(job, options, actor, actor.ready.remote(), True, 0.0))
            until_s = time.monotonic() + keep_s
            for one in self._idle[:count]:
                one.until_s = max(one.until_s, until_s)
            self._wake_watcher()

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

    def count(self, job: str, options: Any) -> int:
        """Return how many idle actors the next pool with these options could take."""
        with self._changed:
            return sum(one.job == job and one.options == options for one in self._idle)

    def clear(self) -> None:
        """End all idle actors now."""
        with self._changed:
            for one in self._idle:
                one.until_s = 0.0
            self._changed.notify_all()

    def _start(self, ray: Any, job: str, options: Any) -> Any:
        if self._class[0] != job:
            self._class = (job, ray.remote(actor_class()))
        actor = self._class[1].options(**options).remote()
        _register_fork_hook()
        self._handles.add(actor)
        return actor

    def _end_others(self, ray: Any, options: Any) -> str:
        """End all idle actors with other options, since the new ones may need their resources; return the job."""
        job = job_of(ray)
        others = [one for one in self._idle if one.job != job or one.options != options]
        self._idle = [one for one in self._idle if one not in others]
        for one in others:
            self.end(one.job, one.actor)
        return job

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
