"""The attributes that a dataset and its parts had when the first workers began, for those that begin later."""

from typing import Any

from headrace.datasets.fork_safety import attributes_of, parts


class Attributes:
    """What the attributes of some objects were, and those of their parts, a few levels deep.

    Kept are the references, no copies: what was changed in place is not restored.

    Args:
        used: The objects.
    """

    def __init__(self, used: Any) -> None:
        found = ((part, attributes_of(part)) for _, part in parts(used))
        self._before = [(part, dict(attributes)) for part, attributes in found if attributes]

    def restore(self) -> None:
        """Restore them, in a process that was forked."""
        for part, before in self._before:
            now = attributes_of(part)
            if now.keys() != before.keys() or any(now[name] is not before[name] for name in before):
                now.clear()
                now.update(before)
