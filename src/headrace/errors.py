"""The package's own exceptions, and checks of arguments with their error messages.

Mistakes in arguments raise plain `ValueError` / `TypeError`. Errors at run time are `HeadraceError`s, which also have
the builtin type that torch raises for the same event.
"""

import operator
import reprlib
from typing import NoReturn

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxlong = _brief.maxother = 200


class HeadraceError(Exception):
    """The base class of all errors of headrace that are not mistakes in arguments."""


class WorkerDied(HeadraceError, RuntimeError):
    """A worker process ended unexpectedly (a signal, the OOM killer, `os._exit`)."""


class DeliveryTimeout(HeadraceError, RuntimeError):
    """No batch arrived within the loader's `timeout`."""


class SlotTooLarge(HeadraceError, RuntimeError):
    """The system refuses the shared memory that a batch needs."""


class StateMismatch(HeadraceError, ValueError):
    """A state does not fit the loader, or ranks disagree."""


class ClusterUnavailable(HeadraceError, RuntimeError):
    """The Ray cluster cannot be reached, has no room for a single worker, or runs other versions than the rank."""


class ShardCorrupt(HeadraceError, ValueError):
    """A shard is no archive, was cut off or changed, or a sample of it is not what its index says."""


class MissingExtra(HeadraceError, ImportError):
    """An optional dependency is not installed; the message says how to install it.

    Args:
        text: What is missing, and for what.
        extra: The extra that brings it; its commands follow the text. "" if the text has everything.
    """

    def __init__(self, text: str, extra: str = "") -> None:
        super().__init__(f"{text}: {pip_install(extra)}" if extra else text)


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to the package that is installed, and that for a checkout."""
    return f'pip install "headrace[{extra}]" (in a checkout: pip install ".[{extra}]")'


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, once: user code may raise the same object several times."""
    line = f"headrace: {text}"
    if line not in getattr(error, "__notes__", ()):
        error.add_note(line)


def bad_value(name: str, value: object, allowed: str, fix: str) -> NoReturn:
    """Raise the `ValueError` for a wrong value: its name, the value, the allowed range and the fix."""
    raise ValueError(f"{name}={shown(value)} is not allowed: expected {allowed}. {fix}")


def bad_type(name: str, value: object, allowed: str, fix: str) -> NoReturn:
    """Raise the `TypeError` for a wrong type: the text of `bad_value`, and the type."""
    kind = type(value).__name__
    raise TypeError(f"{name}={shown(value)} is not allowed: expected {allowed}, got {kind}. {fix}") from None


def check_flag(name: str, value: object, default: bool) -> None:
    """Refuse a value that is neither True nor False.

    Raises:
        TypeError: `value` is not a boolean.
    """
    if not isinstance(value, bool):
        bad_type(name, value, "True or False", f"Leave it out for {default}.")


def shown(value: object) -> str:
    """Return the shortened `repr` of a value, which may be a whole dataset. It never raises."""
    return _brief.repr(value)


def whole_number(
    name: str, value: object, *, low: int = 0, high: int | None = None, fix: str = "Pass a whole number."
) -> int:
    """Return `value` as an int in [low, high], or raise an error that says what is allowed.

    Args:
        name: The option's name, as the user wrote it.
        value: The user's value. Numpy integers count as integers, booleans and floats do not.
        low: Smallest allowed value.
        high: Largest allowed value, or None for no bound.
        fix: One sentence that tells the user what to do instead.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` lies outside the range.
    """
    allowed = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    try:
        if "bool" in str(getattr(value, "dtype", type(value))):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        bad_type(name, value, allowed, fix)
    if number < low or (high is not None and number > high):
        bad_value(name, value, allowed, fix)
    return number
