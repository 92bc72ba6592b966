"""The package's own exceptions, and the checks that give a user's mistake its message.

Mistakes in arguments are plain `ValueError` / `TypeError`; what goes wrong at run time is a
`HeadraceError`, which is also the builtin type that torch raises for the same event.
"""

import operator
import reprlib
from typing import NoReturn

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxlong = _brief.maxother = 200


class HeadraceError(Exception):
    """The root of everything headrace raises that is not a mistake in an argument."""


class WorkerDied(HeadraceError, RuntimeError):
    """A worker process ended without being asked to (a signal, the OOM killer, `os._exit`)."""


class DeliveryTimeout(HeadraceError, RuntimeError):
    """No batch arrived within the loader's `timeout`."""


class SlotTooLarge(HeadraceError, RuntimeError):
    """The system refuses the shared memory that a batch needs."""


class StateMismatch(HeadraceError, ValueError):
    """A state does not fit the loader, or ranks disagree."""


class ClusterUnavailable(HeadraceError, RuntimeError):
    """The Ray cluster cannot be reached, has no room for a single worker, or runs other versions than the rank."""


class MissingExtra(HeadraceError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def note(error: BaseException, text: str) -> None:
    """Add a note to an exception, unless it has it: user code may raise one object again and again."""
    line = f"headrace: {text}"
    if line not in getattr(error, "__notes__", ()):
        error.add_note(line)


def throw(error: BaseException) -> NoReturn:
    """Raise an error, where an expression is called for."""
    raise error


def throw_new(kind: type[Exception], text: str, cause: BaseException | None = None) -> NoReturn:
    """Raise an error that is made only then: whoever raises one again adds to its traceback."""
    raise kind(text) from cause


def bad_value(name: str, value: object, allowed: str, fix: str) -> NoReturn:
    """Raise the `ValueError` that every wrong option gets: its name, value, allowed range and the fix."""
    raise ValueError(f"{name}={shown(value)} is not allowed: expected {allowed}. {fix}")


def bad_type(name: str, value: object, allowed: str, fix: str) -> NoReturn:
    """Raise the `TypeError` that every option of a wrong type gets: `bad_value`'s text, and the type."""
    kind = type(value).__name__
    raise TypeError(f"{name}={shown(value)} is not allowed: expected {allowed}, got {kind}. {fix}") from None


def check_flag(name: str, value: object, default: bool) -> None:
    """Refuse what is neither True nor False.

    Raises:
        TypeError: `value` is not a boolean.
    """
    if not isinstance(value, bool):
        bad_type(name, value, "True or False", f"Leave it out for {default}.")


def shown(value: object) -> str:
    """Return the `repr` of a value, shortened: a whole dataset may have been passed. It never raises."""
    return _brief.repr(value)


def whole_number(
    name: str, value: object, *, low: int = 0, high: int | None = None, fix: str = "Pass a whole number."
) -> int:
    """Return `value` as an int in [low, high], or raise an error that says what is allowed.

    Args:
        name: The option's name, as the user wrote it.
        value: What the user passed; numpy integers count as integers, booleans and floats do not.
        low: Smallest allowed value.
        high: Largest allowed value, or None for no bound.
        fix: One sentence that says what to do instead.

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
