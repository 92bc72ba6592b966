"""Which part of a value it is that cannot be pickled, for the error message."""

import functools
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

from headrace.memory.pickling import Pickler, Stream

_DEEPEST = 30
"""Further down nothing is looked for."""


def unpicklable_part(value: Any, name: str, error: BaseException, kind: type[Pickler] = Pickler) -> str:
    """Say what it is in a value that pickle refuses, and where: "batch['meta'][0].lock is a _thread.lock".

    Args:
        value: What could not be pickled.
        name: What to call it; nothing where its attributes are to be named alone.
        error: What pickling raised: what fails for another reason is not to blame.
        kind: What pickled it.
    """
    probe = _probe(kind)
    above: list[Any] = []
    while len(above) < _DEEPEST:
        above.append(value)
        parts = _parts(value)
        while len(parts) > 1:  # a few passes over millions of items rather than one pickler for each
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
    """Return what pickles to see whether it can, leaving out what contains the value: that would fail in any case."""

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
    """List what pickle would look at next, each with what to write after its owner's name."""
    if isinstance(value, dict):
        return [(f"[{reprlib.repr(key)}]", one) for key, one in value.items()]
    if isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        return [(f".{fields[place]}" if fields else f"[{place}]", one) for place, one in enumerate(value)]
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    try:
        reduced = value.__reduce_ex__(5)
    except Exception:  # noqa: BLE001 - it is the value itself that refuses
        return []
    states = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else getattr(value, "__dict__", None)
    both = states if isinstance(states, tuple) else (states,)  # attributes alone, or with those in slots
    return [(f".{name}", one) for state in both if isinstance(state, dict) for name, one in state.items()]
