"""Why a sample differs from one reading to the next: what it draws from or looks at that no seed decides."""

import builtins
import datetime
import linecache
import multiprocessing
import os
import random
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from headrace import errors
from headrace.cli.verify_digest import SampleDigest, digest
from headrace.fetch import fetches_in_bulk
from headrace.forking import parts
from headrace.plan import Plan
from headrace.types import PlanTask
from headrace.work import Work, Worker

_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random, torch.Generator)
_LARGEST_BYTES = 1 << 20
"""Arrays above this are not watched for changes."""

_BUILDS = 4
"""So many datasets are made to see whether they are equal: one that draws may well draw the same once."""

_NAMED = 5
"""Of what is found so many are named."""

_DRAW = (
    "Draw from headrace.rng() or headrace.torch_rng(), or from the global generators of torch, numpy and random: all "
    "of them are seeded anew for every sample."
)
_BUILD = (
    "Every rank builds its own: seed what the factory draws, sort what it lists, and read the same files everywhere."
)
_INDEX = "Make the sample a function of its index alone; a worker has its own copy of the dataset."


class Probe:
    """Fetches one sample again and again, inline, under the seeds of its position.

    Args:
        make: Builds the dataset anew.
        plan: That of a world of one, one sample a step.
        batched: Whether the loader makes batches.
        epoch: The sample's epoch.
        position: Its place in the epoch's order.
    """

    def __init__(self, make: Callable[[], Any], plan: Plan, batched: bool, epoch: int, position: int) -> None:
        self._make, self._plan, self._batched = make, plan, batched
        self._epoch, self._position = epoch, position

    def explain(self, executor: str) -> list[str]:
        """Return why the sample differs, what is to blame and what to do, in lines.

        Args:
            executor: That of the cell in which it differed.
        """
        dataset = self._make()
        first = self._fetch(dataset)
        before = _states(dataset)
        with recorded() as calls:
            second = self._fetch(dataset)
        changed = _changes(before, _states(dataset))
        if first.whole != second.whole:
            said = ["Fetched twice in one process under the same seeds, it differs already."]
            return said + _blamed(changed, calls, ("entropy", "clock"))
        looks = calls
        for _ in range(_BUILDS):
            with recorded() as calls:
                again = self._fetch(self._make())
            if first.whole != again.whole:
                said = ["It is the same in one dataset, but not in every one that the factory makes."]
                return [*said, *_read(calls, ("entropy", "clock")), _BUILD]
        return (
            self._of_others(first) or self._of_surroundings(first) or self._undecided(dataset, looks, changed, executor)
        )

    def _fetch(self, dataset: Any, *others: int) -> SampleDigest:
        """Fetch the sample in a process that is no worker; before it, those at other positions."""
        work = Work(
            dataset,
            collate_fn=lambda samples: digest(samples[0] if self._batched else samples),
            batched=self._batched,
            plan=self._plan,
        )
        worker = Worker(work)
        digests = [worker.run_inline(PlanTask(self._epoch, one)) for one in (*others, self._position)]
        found: SampleDigest = digests[-1]
        return found

    def _of_others(self, usual: SampleDigest) -> list[str]:
        """Tell whether it matters which samples were fetched before."""
        count = self._plan.samples
        others = {(self._position + step) % count for step in (-2, -1, 1, 2)} - {self._position}
        dataset = self._make()
        before = _states(dataset)
        found = self._fetch(dataset, *sorted(others))
        if found.whole == usual.whole:
            return []
        said = ["It depends on which samples the same process fetched before it."]
        return said + _blamed(_changes(before, _states(dataset)), [], ())

    def _of_surroundings(self, usual: SampleDigest) -> list[str]:
        """Tell whether one of the things matters that differ between a worker and the main process."""
        for surrounding, (consequence, remedy) in _SURROUNDINGS.items():
            dataset = self._make()
            with surrounding(dataset):
                found = self._fetch(dataset)
            if found.whole != usual.whole:
                return [consequence, remedy]
        found_in_thread: list[SampleDigest] = []
        thread = threading.Thread(target=lambda: found_in_thread.append(self._fetch(self._make())))
        thread.start()
        thread.join()
        if found_in_thread and found_in_thread[0].whole != usual.whole:
            return ["It depends on which thread fetches it.", _INDEX]
        return []

    def _undecided(
        self, dataset: Any, calls: list["Call"], changed: list[tuple[bool, str]], executor: str
    ) -> list[str]:
        """Say what is left where fetching it in this process shows no difference."""
        if fetches_in_bulk(dataset):
            return [
                "The dataset has a __getitems__ of its own, whose draws are a batch's and not a sample's: they change "
                "with the batch size, and so with the world.",
                "Leave __getitems__ out, or derive what it draws from each index.",
            ]
        said = [
            "Fetched alone in this process it is always the same, so it depends on who computes it: on the worker's "
            "process or thread, on caches, or on what was fetched before."
        ]
        if executor == "thread":
            said.append(
                "Threads share the dataset: code that seeds a global generator itself, or changes attributes "
                "of the dataset, disturbs what another thread computes."
            )
        return said + _blamed(changed, calls, ("entropy", "clock", "identity"))


class Call(NamedTuple):
    """A call whose value no seed decides.

    Attributes:
        kind: "entropy", "clock", or "identity" of who computes.
        what: What it reads, in words.
        where: The line of the user's code that led to it.
    """

    kind: str
    what: str
    where: str


class State(NamedTuple):
    """What an object held at a moment.

    Attributes:
        kind: The name of its type.
        content: Its value, or a digest of it.
        draws: Whether it is a random generator.
    """

    kind: str
    content: Any
    draws: bool


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record the calls in this thread, by any name, that read entropy, clocks, or who computes."""
    calls: list[Call] = []

    def note(kind: str, what: str, frame: FrameType | None, direct: bool) -> None:
        while frame is not None and not direct and _of_library(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None and not _of_library(frame.f_code.co_filename):
            file, line = frame.f_code.co_filename, frame.f_lineno
            source = linecache.getline(file, line).strip()
            call = Call(kind, what, f"{_shortened(file)}:{line} in {frame.f_code.co_name}: {source}")
            if call not in calls:
                calls.append(call)

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            kind_and_name = _builtin(argument)
            if kind_and_name:
                kind, what = kind_and_name
                note(kind, what, frame, direct=kind != "entropy")
        elif event == "call" and frame.f_code in _FUNCTIONS:
            kind, what, unseeded = _FUNCTIONS[frame.f_code]
            if unseeded is None or frame.f_locals.get(unseeded) is None:
                note(kind, what, frame.f_back, direct=kind != "entropy")

    before = sys.getprofile()
    sys.setprofile(hook)
    try:
        yield calls
    finally:
        sys.setprofile(before)


_BUILTINS: dict[Any, tuple[str, str]] = {
    os.urandom: ("entropy", "the system's entropy"),
    **{
        getattr(time, name): ("clock", f"the clock (time.{name})")
        for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time")
    },
    os.getpid: ("identity", "the process (os.getpid)"),
    os.getppid: ("identity", "the process (os.getppid)"),
    threading.get_ident: ("identity", "the thread (threading.get_ident)"),
    socket.gethostname: ("identity", "the host (socket.gethostname)"),
    builtins.id: ("identity", "an address in memory (id)"),
    builtins.hash: ("identity", "a hash, which for text is another in each process (hash)"),
}

_FUNCTIONS: dict[CodeType, tuple[str, str, str | None]] = {
    # With the argument that must be None for it to be unseeded.
    random.Random.__init__.__code__: ("entropy", "the system's entropy (an unseeded random.Random)", "x"),
    random.Random.seed.__code__: ("entropy", "the system's entropy (random.seed without a seed)", "a"),
    random.SystemRandom.random.__code__: ("entropy", "the system's entropy", None),
    torch.random.seed.__code__: ("entropy", "the system's entropy (torch.seed)", None),
    get_worker_info.__code__: ("identity", "the worker (torch.utils.data.get_worker_info)", None),
    threading.current_thread.__code__: ("identity", "the thread (threading.current_thread)", None),
    multiprocessing.current_process.__code__: ("identity", "the process (multiprocessing.current_process)", None),
}


def _builtin(called: Any) -> tuple[str, str] | None:
    owner = getattr(called, "__self__", None)
    if isinstance(owner, torch.Generator) and called.__name__ == "seed":
        return "entropy", "the system's entropy (torch.Generator.seed)"
    if isinstance(owner, type) and issubclass(owner, datetime.date) and called.__name__ in ("now", "today", "utcnow"):
        return "clock", f"the clock ({owner.__name__}.{called.__name__})"
    try:
        return _BUILTINS.get(called)
    except TypeError:  # a method of something that cannot be hashed
        return None


_LIBRARIES = tuple(
    f"{Path(str(folder)).resolve()}{os.sep}"
    for folder in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        *(Path(str(package.__file__)).parent for package in (np, torch, errors)),
    )
)


def _of_library(file: str) -> bool:
    """Tell whether code is of Python's, numpy's, torch's or ours: who called it is to blame then."""
    if file.startswith("<"):
        return True
    folder = next((one for one in _LIBRARIES if file.startswith(one)), "")
    rest = file.removeprefix(folder)
    return bool(folder) and not rest.startswith(("site-packages", "dist-packages"))


def _shortened(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _states(dataset: Any) -> dict[str, State]:
    """Return the states of what a fetch could change, by the expression that leads to it."""
    found: dict[str, State] = {}
    for path, part in [*parts(dataset), *_of_modules()]:
        content = _content(part)
        if content is not None:
            kind = type(part)
            name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
            found[path] = State(
                name.replace("_generator.", "").replace("_C.", ""), content, isinstance(part, _GENERATORS)
            )
    return found


def _of_modules() -> Iterator[tuple[str, Any]]:
    """Yield the generators that stand in modules, other than the global ones."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not _of_library(file):
            for attribute, value in list(vars(module).items()):
                if issubclass(type(value), _GENERATORS):
                    yield f"{name}.{attribute}", value


def _content(part: Any) -> Any:
    """Return what tells whether an object has changed; None of what is not watched."""
    kind = type(part)
    if issubclass(kind, random.SystemRandom):
        return None
    if issubclass(kind, np.random.Generator):
        return digest(part.bit_generator.state).whole
    if issubclass(kind, np.random.BitGenerator):
        return digest(part.state).whole
    if issubclass(kind, np.random.RandomState | torch.Generator):
        return digest(part.get_state()).whole
    if issubclass(kind, random.Random):
        return digest(part.getstate()).whole
    if kind in (int, float, bool, str, bytes):
        return part
    if kind in (list, dict, set):
        return f"{len(part)} items"
    if (kind is np.ndarray and not part.dtype.hasobject and part.nbytes <= _LARGEST_BYTES) or (
        kind is torch.Tensor and part.nbytes <= _LARGEST_BYTES
    ):
        return digest(part).whole
    return None


def _changes(before: dict[str, State], after: dict[str, State]) -> list[tuple[bool, str]]:
    """Return what has another state now: whether it is a generator, and what has become of it."""
    changed = []
    for path, now in after.items():
        was = before.get(path)
        if was == now:
            continue
        if was is None or isinstance(now.content, bytes):
            words = f"{path} (a {now.kind}){' is new' if was is None else '' if now.draws else ' changed'}"
        else:
            words = f"{path} went from {was.content!r:.40} to {now.content!r:.40}"
        changed.append((now.draws, words))
    return changed


def _read(calls: list[Call], kinds: tuple[str, ...]) -> list[str]:
    named = [call for call in calls if call.kind in kinds]
    return [f"It reads {call.what}, at {call.where}" for call in named[:_NAMED]]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _blamed(changed: list[tuple[bool, str]], calls: list[Call], kinds: tuple[str, ...]) -> list[str]:
    """Name what is to blame, generators first, and say what to do."""
    lines = []
    generators = [words for draws, words in changed if draws]
    others = [words for draws, words in changed if not draws]
    if generators:
        lines.append(f"No position seeds what it draws from: {_listed(generators)}.")
    lines += _read(calls, kinds)
    decided = generators or any(call.kind == "entropy" for call in calls)
    if others and not decided:
        lines.append(f"Meanwhile {_listed(others)}.")
    return [*lines, _DRAW if decided else _INDEX]


@contextmanager
def _as_worker(dataset: Any) -> Iterator[None]:
    before = torch_worker._worker_info
    torch_worker._worker_info = torch_worker.WorkerInfo(id=1, num_workers=2, seed=1, dataset=dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = before


@contextmanager
def _on_one_thread(dataset: Any) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_SURROUNDINGS: dict[Callable[[Any], Any], tuple[str, str]] = {
    _as_worker: (
        "It depends on what torch.utils.data.get_worker_info() says: on which worker fetches it, of how many.",
        "Make the sample a function of its index alone; every worker is asked for other samples each time.",
    ),
    _on_one_thread: (
        "It depends on how many threads torch computes with, which in workers is one: sums are rounded otherwise.",
        "Call torch.set_num_threads(1) in the factory, or compute it in the training loop.",
    ),
}
