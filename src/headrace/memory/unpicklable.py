"""Find the part of a value that cannot be pickled, for the error message."""

import functools
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from headrace.memory.pickling import Pickler, Stream

_DEEPEST = 30
"""How many levels below the value are searched."""


def unpicklable_part(value: Any, name: str, error: BaseException, kind: type[Pickler] = Pickler) -> str:
    """Return the part of a value that pickle refuses, and its type: "batch['meta'][0].lock is a _thread.lock".

    Args:
        value: The value that could not be pickled.
        name: Its name; empty to name its attributes only.
        error: The exception that pickling raised. Parts that raise another type of exception do not count.
        kind: The pickler that was used.
    """
    probe = _probe(kind)
    above: list[Any] = []
    while len(above) < _DEEPEST:
        above.append(value)
        parts = _parts(value)
        while len(parts) > 1:  # bisection, since one pickler for each of millions of items is slow
            middle = len(parts) // 2
            half = parts[:middle]
            parts = half if _refused(probe, [part for _, part in half], above, error) else parts[middle:]
        if not parts or not _refused(probe, parts[0][1], above, error):
            break
        name += parts[0][0]
        value = parts[0][1]
    kind = type(value)
    label = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    which = f" ({value.__qualname__})" if hasattr(value, "__qualname__") else ""
    return f"{name.removeprefix('.') or 'something'} is a {label}{which}"


def _probe(kind: type[Pickler]) -> Callable[[Any, Sequence[Any]], None]:
    """Return a function that tries to pickle a value. References to the objects that contain it are left out."""

    class Probe(kind):  # type: ignore[valid-type, misc]
        known: set[int]

        def persistent_id(self, value: Any) -> Any:
            return id(value) if id(value) in self.known else None

    def probe(value: Any, above: Sequence[Any]) -> None:
        pickler = Probe(Stream(), [], {}, shared=True)
        pickler.known = {id(one) for one in above}
        pickler.dump(value)

    return probe


def _refused(
    probe: Callable[[Any, Sequence[Any]], None], value: Any, above: Sequence[Any], error: BaseException
) -> bool:
    try:
        probe(value, above)
    except Exception as refusal:  # noqa: BLE001 - whatever the user's classes raise
        return type(refusal) is type(error)
    return False


def _parts(value: Any) -> list[tuple[str, Any]]:
    """List the parts of a value that pickle would visit, each with the text that follows the value's name."""
    if isinstance(value, dict):
        return [(f"[{reprlib.repr(key)}]", one) for key, one in value.items()]
    if isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        return [(f".{fields[place]}" if fields else f"[{place}]", one) for place, one in enumerate(value)]
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:  # noqa: BLE001 - the value itself is the part
        return []
    states = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else getattr(value, "__dict__", None)
    both = states if isinstance(states, tuple) else (states,)  # attributes alone, or with those in slots
    return [(f".{name}", one) for state in both if isinstance(state, dict) for name, one in state.items()]
