"""Which fields of a sample are read: all, or for each item of a tuple the first of its alternatives."""

from collections.abc import Container, Iterable, Sequence
from typing import NoReturn

from headrace.errors import bad_type, bad_value

ABOUT = ("__key__", "__url__")
"""What can be asked for beside the fields of a sample: its key, and the name of its shard."""


def slots_of(fields: str | Sequence[str]) -> list[str]:
    """Return the alternatives for each item of a sample, as text separated by `;`.

    Args:
        fields: As the user wrote it: "jpg;png cls", or ("jpg;png", "cls").

    Raises:
        TypeError: It is no text or list of texts.
        ValueError: It is empty.
    """
    slots = fields.split() if isinstance(fields, str) else fields
    if not isinstance(slots, Sequence) or not all(isinstance(slot, str) for slot in slots):
        bad_type("fields", fields, "a text or a list of texts", "For example 'jpg;png cls'.")
    if not slots or not all(slot.strip(";") for slot in slots):
        bad_value("fields", fields, "at least one field, none of them empty", "For example 'jpg;png cls'.")
    return [slot.lower() for slot in slots]


def chosen(slot: str, among: Container[str]) -> str | None:
    """Return the first alternative of a slot that a sample has; None if it has none."""
    return next((name for name in slot.split(";") if name in among), None)


def refuse_missing(sample: str, slot: str, has: Iterable[str]) -> NoReturn:
    """Raise the error for a sample without a wanted field."""
    raise ValueError(f"{sample} has no {slot!r}: it has {', '.join(has)}.")
