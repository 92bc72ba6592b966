"""States that an earlier release saved still load, and the same samples follow."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from progress.saved_loaders import LOADERS, rest_of

SAVED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "saved_states.json").read_text())

pytestmark = pytest.mark.filterwarnings("ignore:the state of a loader without a plan")


def test_each_loader_has_a_state() -> None:
    assert SAVED.keys() == LOADERS.keys()


@pytest.mark.parametrize("name", LOADERS)
def test_what_follows_a_saved_state(name: str) -> None:
    make, _ = LOADERS[name]
    torch.manual_seed(11)  # from which torch's own order is drawn where the state has none yet
    loader = make()
    loader.load_state_dict(SAVED[name]["state"])
    rest = rest_of(loader)
    assert (rest if loader.in_order else sorted(rest)) == SAVED[name]["rest"]


@pytest.mark.parametrize("name", [name for name, (_, delivered) in LOADERS.items() if delivered])
def test_states_have_the_same_keys_today(name: str) -> None:
    make, delivered = LOADERS[name]
    loader = make()
    reader = iter(loader)
    for _ in range(delivered):
        next(reader)
    state, saved = loader.state_dict(), SAVED[name]["state"]
    assert {key: type(value) for key, value in state.items()} == {key: type(value) for key, value in saved.items()}
    assert [state[key] for key in ("version", "mode", "length", "order")] == [
        saved[key] for key in ("version", "mode", "length", "order")
    ]
    if loader.in_order and saved["rank_local"]:
        assert json.loads(state["rank_local"]).keys() == json.loads(saved["rank_local"]).keys()
