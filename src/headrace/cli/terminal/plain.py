"""Texts of others, safe for a terminal."""

import logging
import re
import warnings

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""What a terminal obeys instead of showing it: control characters, directions of writing; and halves of characters."""


def plain(text: str) -> str:
    """Return a text with each control character but the line feed and the tab written as Python writes it."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


_usual = warnings.formatwarning


def _escaped(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return plain(_usual(message, category, filename, lineno, line))


def escape_messages() -> None:
    """Let the warnings and the log of this process be plain, where nobody else has said how they are written."""
    warnings.formatwarning = _escaped
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Plain())
