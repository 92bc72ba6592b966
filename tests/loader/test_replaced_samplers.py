"""Subclasses that put a sampler of their own into a loader after it was made, as timm's and ultralytics' do."""

from typing import Any

import pytest

from headrace import DataLoader


class Repeats:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        while True:
            yield from iter(self.sampler)


class Repeating(DataLoader[Any]):
    """One endless iterator for all epochs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        object.__setattr__(self, name, Repeats(getattr(self, name)))
        self.endless = super().__iter__()

    def __len__(self) -> int:
        return len((self.batch_sampler or self.sampler).sampler)

    def __iter__(self) -> Any:
        return (next(self.endless) for _ in range(len(self)))


@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("in_a_world", [False, True])
def test_under_a_plan_it_is_refused(batch_size: int | None, in_a_world: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seed: dict[str, Any] = {} if in_a_world else {"seed": 1}
    if in_a_world:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"sampler=Repeats was put into this Repeating .* persistent_workers=True"):
        Repeating(range(6), batch_size=batch_size, **seed)


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_plan_it_is_read(workers: int) -> None:
    loader = Repeating(range(6), batch_size=2, num_workers=workers)
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == 2 * [[[0, 1], [2, 3], [4, 5]]]
