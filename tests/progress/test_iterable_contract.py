"""The contract for iterable datasets, cell by cell beside torch's loader and torchdata's: `docs/iterable.md` has it.

In every cell a loader is read without a stop, and others go on from states that were saved before the first batch,
after it was asked for an iterator, in the middle, and at the end of an epoch; each to the end of the epoch after.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.utils.data
from torchdata.stateful_dataloader import StatefulDataLoader

from headrace import DataLoader
from progress.iterable_forms import FORMS, LENGTH

STOPS = ("begun", "middle", "end")
MIDDLE = 3
WORKERS: dict[str, dict[str, Any]] = {
    "0": {},
    "2": {"num_workers": 2},
    "2, in any order": {"num_workers": 2, "in_order": False},
    "2, persistent": {"num_workers": 2, "persistent_workers": True},
}

# It gets the state at its end and is asked for an iterator twice, the first of which never begins.
TORCHDATA_DIFFERS = {("GeneratorBeginningThere", "0", "end")}

pytestmark = pytest.mark.filterwarnings("error:the iterable dataset was read again")


def epoch(batches: Iterator[Any], count: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in itertools.islice(batches, count)]


def stopped(make: Callable[[], Any], stop: str) -> tuple[list[list[int]], Any]:
    """Return what a new loader yielded of its first epoch before a stop, and its state there."""
    loader = make()
    reader = iter(()) if stop == "before" else iter(loader)
    got = epoch(reader, {"middle": MIDDLE, "end": None}.get(stop, 0))
    return got, copy.deepcopy(loader.state_dict())


def gone_on(make: Callable[[], Any], state: Any, stop: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return the rest of the first epoch, and the next, by a new loader that has the state."""
    loader = make()
    loader.load_state_dict(state)
    rest = [] if stop == "end" else epoch(iter(loader))
    return rest, epoch(iter(loader))


@pytest.mark.parametrize("seed", [None, 7], ids=["no seed", "seed"])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("form", FORMS)
def test_the_contract(form: str, workers: str, seed: int | None) -> None:
    options = WORKERS[workers] | {"batch_size": 2}
    in_order = options.get("in_order", True)

    def ours() -> Any:
        return DataLoader(FORMS[form](), seed=seed, **options)

    def seen(batches: list[list[int]]) -> list[list[int]]:
        return batches if in_order else sorted(batches)

    loader = ours()
    whole = [epoch(iter(loader)) for _ in range(2)]
    assert len(whole[0]) == LENGTH // 2 * (options.get("num_workers") or 1)
    if seed is None:
        torchs = torch.utils.data.DataLoader(FORMS[form](), **options)
        assert [seen(one) for one in whole] == [seen(epoch(iter(torchs))) for _ in range(2)]
    for stop in STOPS if options.get("num_workers") else ("before", *STOPS):
        got, state = stopped(ours, stop)
        rest, following = gone_on(ours, state, stop)
        assert seen(got + rest) == seen(whole[0]), stop
        assert seen(following) == seen(whole[1]), stop


@pytest.mark.parametrize("workers", [workers for workers in WORKERS if "any" not in workers])
@pytest.mark.parametrize("form", FORMS)
def test_torchdata_goes_on_at_the_same_places(form: str, workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It promises nothing for batches in any order."""
    monkeypatch.setattr(logging.getLogger("torchdata.stateful_dataloader.stateful_dataloader"), "disabled", True)

    def theirs() -> Any:
        return StatefulDataLoader(FORMS[form](), batch_size=2, **WORKERS[workers])

    loader = theirs()
    whole = [epoch(iter(loader)) for _ in range(2)]
    del loader
    for stop in STOPS if "2" in workers else ("before", *STOPS):
        got, state = stopped(theirs, stop)
        rest, following = gone_on(theirs, state, stop)
        same = got + rest == whole[0] and following == whole[1]
        assert same != ((form, workers, stop) in TORCHDATA_DIFFERS), stop
