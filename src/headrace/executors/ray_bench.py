"""Actors between two pools: a process that has imported torch is worth seconds, and is kept for a moment."""

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headrace.executors.ray_cluster import import_ray

_END_S = 0.25
"""How long to wait for an actor to end what it is at: to start another takes longer."""


@dataclass
class _Idle:
    job: str
    options: Any
    actor: Any
    last_call: Any
    starting: bool
    until_s: float


class Bench:
    """Actors that no pool needs any more; the next may need some. Of the pool that one served nothing is kept in it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[_Idle] = []
        self._watched = False
        # A pool may end with its actors' handles in one collection of garbage, and without one an actor dies.
        self._handles: set[Any] = set()

    def new(self, ray: Any, kind: type, options: Any) -> Any:
        """Return an idle actor, or ask Ray for another."""
        actor = self._take(ray, options)
        if actor is None:
            actor = ray.remote(kind).options(**options).remote()
            self._handles.add(actor)
        return actor

    def leave(self, ray: Any, options: Any, actor: Any, last_call: Any, starting: bool, idle_s: float) -> None:
        """Keep an actor for a while that is, or will be, idle once a call is answered; then end it.

        Args:
            ray: The module, connected.
            options: What it was made with.
            actor: The actor.
            last_call: The call.
            starting: Whether it is only being made, and will be there sooner than a new one.
            idle_s: How long to keep it, in seconds.
        """
        with self._changed:
            self._idle.append(_Idle(_job_of(ray), options, actor, last_call, starting, time.monotonic() + idle_s))
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="ray-idle-actors", daemon=True).start()
            self._changed.notify_all()

    def _take(self, ray: Any, options: Any) -> Any:
        """Return an idle actor with these options, or None; those with others are in the way, and are ended."""
        with self._changed:
            job = _job_of(ray)
            self._idle = [one for one in self._idle if one.job == job]  # others have gone with their cluster
            for one in [one for one in self._idle if one.options != options]:
                self._idle.remove(one)
                self.end(ray, one.actor)
            calls = {one.last_call: one for one in self._idle}
            done = ray.wait(list(calls), timeout=0)[0] if calls else []
            starting = [call for call, one in calls.items() if one.starting and call not in done]
            if calls and not done and not starting:
                done = ray.wait(list(calls), timeout=_END_S)[0]
            for call in (*done, *starting):
                self._idle.remove(calls[call])
                return calls[call].actor
            return None

    def clear(self) -> None:
        """End all that are idle, now."""
        with self._changed:
            for one in self._idle:
                one.until_s = 0.0
            self._changed.notify_all()

    def _watch(self) -> None:
        ray = import_ray()
        with self._changed:
            while self._idle:
                now_s = time.monotonic()
                for one in [one for one in self._idle if one.until_s <= now_s]:
                    self._idle.remove(one)
                    self.end(ray, one.actor)
                next_s = min((one.until_s for one in self._idle), default=now_s)
                if self._idle:
                    self._changed.wait(max(0.0, next_s - now_s))
            self._watched = False

    def end(self, ray: Any, actor: Any) -> None:
        """End an actor, if there is still a Ray to end it."""
        self._handles.discard(actor)
        with suppress(Exception):  # it is gone, or its cluster is
            if ray.is_initialized():
                ray.kill(actor)

    def forget(self) -> None:
        """Begin anew in a forked process, whose actors these are not; Ray is not to hear of handles that go there."""
        _inherited.append(self._handles)
        self.__init__()  # type: ignore[misc]


_inherited: list[Any] = []

BENCH = Bench()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=BENCH.forget)


def _job_of(ray: Any) -> str:
    """Return what Ray calls this process's connection to the cluster."""
    return str(ray.get_runtime_context().get_job_id())
