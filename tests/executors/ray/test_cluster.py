"""The cluster's head: what counts as its answer."""

import socket

import pytest

from headrace.executors.ray.cluster import Head, import_ray

pytestmark = pytest.mark.ray


def test_a_head_that_runs_answers() -> None:
    head = Head(import_ray())
    assert head.address
    assert head.answers()


@pytest.mark.parametrize("by_tls", [False, True])
def test_a_connection_alone_is_no_answer(by_tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system accepts connections for a head that hangs or is being ended; with TLS a server says nothing first."""
    monkeypatch.setenv("RAY_USE_TLS", "1" if by_tls else "0")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        head = Head(import_ray())
        head.address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert head.answers() == by_tls
