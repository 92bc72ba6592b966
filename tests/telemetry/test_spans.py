"""Names in the traces of torch's profiler."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from accelerators import ThreadBackend
from headrace import DataLoader
from headrace.delivery.device import backends
from headrace.telemetry.spans import span


def test_waits_and_copies_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "cpu", ThreadBackend)
    loader = DataLoader(TensorDataset(torch.zeros(6, 2)), 2, num_workers=1, seed=0, device="cpu")
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        assert len([*loader]) == 3
    counts = {event.key: event.count for event in trace.key_averages()}
    assert counts["headrace: wait for a batch"] == 3
    assert counts["headrace: copy to the device"] == 3


def test_without_a_profiler_nothing_is_made() -> None:
    assert span("one") is span("other")
