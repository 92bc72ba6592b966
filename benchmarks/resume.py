"""Resuming: the first batch after it, and the cost of a state at each step."""

import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.rows import Row, less_is_better
from headrace import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls what torch has deprecated
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

RUNS = 15
OURS, STEP, BATCH_SIZE = 10**9, 10**6, 256
RIVALS = 10**7
STEPS = 200


def loader(length: int = OURS) -> DataLoader[Any]:
    """Make one of ours, over a dataset that costs nothing."""
    return DataLoader(range(length), batch_size=BATCH_SIZE, shuffle=True, seed=1)  # type: ignore[arg-type]


def rival(length: int = RIVALS) -> Any:
    """Make one of torchdata's."""
    return StatefulDataLoader(range(length), batch_size=BATCH_SIZE, shuffle=True)


def resumed(make: Callable[[], Any], state: dict[str, Any] | None) -> tuple[float, ...]:
    """Return the milliseconds from a new loader to its first batch, and the state's kilobytes."""
    made = make()
    start = time.perf_counter()
    if state is not None:
        made.load_state_dict(state)
    reader = iter(made)
    next(reader)
    return (time.perf_counter() - start) * 1e3, len(json.dumps(state, default=str)) / 1e3


def half_way() -> dict[str, Any]:
    """Return the rival's state in the middle of its epoch."""
    made = rival()
    for _ in itertools.islice(made, RIVALS // BATCH_SIZE // 2):
        pass
    state: dict[str, Any] = made.state_dict()
    return state


def per_step(make: Callable[..., Any], workers: int, take: bool, **options: Any) -> float:
    """Return the microseconds of a step, with or without taking the state."""
    made = make(range(BATCH_SIZE * STEPS), batch_size=BATCH_SIZE, num_workers=workers, collate_fn=first, **options)
    reader = iter(made)
    next(reader)
    start = time.perf_counter()
    for _ in reader:
        if take:
            made.state_dict()
    return (time.perf_counter() - start) * 1e6 / (STEPS - 1)


def our_states(workers: int) -> tuple[float, ...]:
    """Return the cost of a state at each step, in microseconds: the call alone, since steps do no work for it."""
    numbers: Any = range(BATCH_SIZE * STEPS)
    made = DataLoader(numbers, batch_size=BATCH_SIZE, num_workers=workers, collate_fn=first, seed=1)
    spent = 0.0
    for _ in made:
        start = time.perf_counter()
        made.state_dict()
        spent += time.perf_counter() - start
    return (spent * 1e6 / STEPS,)


def their_states(workers: int) -> tuple[float, ...]:
    """Return the same for torchdata's default: a step with states, less a step without any snapshot."""
    without = per_step(StatefulDataLoader, workers, False, snapshot_every_n_steps=10**9)
    return (per_step(StatefulDataLoader, workers, True) - without,)


def first(samples: list[int]) -> int:
    """Collate nothing."""
    return samples[0]


def resume() -> Iterator[Row]:
    """Compare a resume with a fresh start, and states with torchdata's."""
    state = loader().state_dict() | {"samples": STEP * BATCH_SIZE % OURS}
    yield from less_is_better(
        {"first batch, resumed at step 10^6 of 10^9 samples": "ms"},
        partial(resumed, loader, state),
        partial(resumed, loader, None),
        "a fresh start",
        RUNS,
    )
    theirs = half_way()
    yield from less_is_better(
        {"first batch, resumed there": "ms", "its state": "kB"},
        partial(resumed, loader, state),
        partial(resumed, rival, theirs),
        "StatefulDataLoader half way through 10^7",
        5,
    )
    for workers in (0, 2):
        yield from less_is_better(
            {f"a state at each step, {workers} workers": "us"},
            partial(our_states, workers),
            partial(their_states, workers),
            "StatefulDataLoader",
            RUNS,
        )
