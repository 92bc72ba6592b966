"""The attributes of a dataset's parts, put back in a forked process."""

from types import SimpleNamespace

from headrace.datasets.attributes import Attributes


def test_they_are_put_back() -> None:
    inner = SimpleNamespace(size=1, items=[1])
    outer = SimpleNamespace(held=[inner], old=2)
    before = Attributes((outer, None))
    inner.size, inner.new, outer.held = 5, 6, []
    inner.items.append(2)
    del outer.old
    before.restore()
    assert outer == SimpleNamespace(held=[inner], old=2)
    assert inner == SimpleNamespace(size=1, items=[1, 2]), "what was changed in place stays"
