"""The screen of the commands: where there is no terminal, long work is told of now and then."""

import time

import pytest

from headrace.cli.terminal.screen import Screen, working


@pytest.mark.parametrize("at_once", [True, False])
def test_a_line_now_and_then(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    screen = Screen()
    with screen.capture() as said, working(screen, at_once) as show:
        for second in range(12):
            now_s = 100.0 + second
            show(f"{second} [b] \x1b")
    expected = [0, 5, 10] if at_once else [5, 10]
    assert said.get().splitlines() == [f"{second} [b] \\x1b" for second in expected]
