"""Actors between two pools: a process that has imported torch is worth seconds, and is kept for a moment."""

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
"""How long to wait for an actor to end what it is at: to start another takes longer."""


@dataclass(eq=False)
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
        self._ending: deque[tuple[str, Any]] = deque()
        self._watched = False
        # A pool may end with its actors' handles in one collection of garbage, and without one an actor dies.
        self._handles: set[Any] = set()

    def new(self, ray: Any, kind: type, options: Any) -> tuple[Any, bool]:
        """Return an idle actor, or ask Ray for another; and whether it is one that was idle."""
        actor = self._take(ray, options)
        if actor is not None:
            return actor, True
        actor = ray.remote(kind).options(**options).remote()
        _forget_in_forks()
        self._handles.add(actor)
        return actor, False

    def leave(self, job: str, options: Any, actor: Any, last_call: Any, starting: bool, idle_s: float) -> None:
        """Keep an actor for a while that is, or will be, idle once a call is answered; then end it.

        Args:
            job: The rank's, as `job_of` says it.
            options: What it was made with.
            actor: The actor.
            last_call: The call.
            starting: Whether it is only being made, and will be there sooner than a new one.
            idle_s: How long to keep it, in seconds.
        """
        with self._changed:
            self._idle.append(_Idle(job, options, actor, last_call, starting, time.monotonic() + idle_s))
            self._see_to_it()

    def end(self, job: str, actor: Any) -> None:
        """End an actor soon.

        Not here: to be ended it takes one of Ray's threads, which may be the very one that collects the pool.
        """
        self._ending.append((job, actor))
        with self._changed:
            self._see_to_it()

    def clear(self) -> None:
        """End all that are idle, now."""
        with self._changed:
            for one in self._idle:
                one.until_s = 0.0
            self._changed.notify_all()

    def _take(self, ray: Any, options: Any) -> Any:
        """Return an idle actor with these options, or None; those with others are in the way, and are ended."""
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

    def _see_to_it(self) -> None:
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
                with suppress(Exception):  # it is gone, or its cluster is
                    if ray.is_initialized() and job_of(ray) == job:
                        ray.kill(actor)

    def forget(self) -> None:
        """Begin anew in a forked process, whose actors these are not; Ray is not to hear of handles that go there."""
        _inherited.append((self._handles, self._idle, self._ending))
        self.__init__()  # type: ignore[misc]


_inherited: list[Any] = []

BENCH = Bench()


@functools.cache
def _forget_in_forks() -> None:
    # Not before there is something to forget: forked workers that know nothing of Ray would do it, too.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=BENCH.forget)
