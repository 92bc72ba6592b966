"""Making a loader like the user's, with other arguments."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from headrace.loader import DataLoader


class CannotRemake(Exception):
    """A loader cannot be made anew with other arguments; the text says why."""


def remade(loader: Any, changed: Mapping[str, Any], optional: Collection[str] = ()) -> Any:
    """Return a loader of the same class with the same arguments, except for some.

    Args:
        loader: The loader.
        changed: The arguments that change, with their new values.
        optional: Those of them that the class need not take; they are then left out.

    Raises:
        CannotRemake: The class does not take an argument that must change, or does not keep one that it needs.
    """
    kind = type(loader)
    accepted = _parameters(kind)
    lacking = [name for name in changed if name not in accepted and name not in optional]
    lost = [
        name
        for name, one in accepted.items()
        if one.default is inspect.Parameter.empty and name not in changed and not hasattr(loader, name)
    ]
    if lacking or lost:
        why = f"does not take {', '.join(lacking)}" if lacking else f"does not keep its argument {', '.join(lost)}"
        raise CannotRemake(f"{kind.__qualname__} {why}")
    kept = {name: getattr(loader, name) for name in accepted if hasattr(loader, name)}
    return kind(**kept | {name: value for name, value in changed.items() if name in accepted})


def _parameters(kind: type) -> Mapping[str, inspect.Parameter]:
    """Return the arguments that a loader's class takes by name, found as frameworks find them."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found):
        found += list(inspect.signature(DataLoader.__init__).parameters.values())[1:]
    return {one.name: one for one in reversed(found) if one.kind in named}
