"""Generators that a dataset does not use are not seeded for each sample, and no bit depends on that."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from headrace import DataLoader
from headrace.plan import Plan, Shuffled
from headrace.plan.keys import sample_seeds
from headrace.randomness import seed_from_words
from headrace.types import PlanTask
from headrace.worker import seeding
from headrace.worker.seeding import Seeder, numpy_state, python_state, torch_state
from headrace.worker.work import Work
from headrace.worker.worker import Worker

N, BATCH_SIZE = 24, 4
Draw = Callable[[int], float]


def late(draw: Draw, index: int = 17) -> Draw:
    """Draw for one sample only, which is in none of the first batches."""
    return lambda at: draw(at) if at == index else 0.0


def in_turn(at: int) -> float:
    return (random.random, np.random.rand, lambda: torch.rand(()).item(), float)[at % 4]()


def decided(at: int) -> float:
    """Draw from generators that depend on what the first has given."""
    first = torch.rand(()).item()
    second = float(np.random.rand()) if first < 0.25 else random.random()
    return second + (float(np.random.rand()) if second > 0.5 else 0.0)


def own_torch_seed(at: int) -> float:
    torch.manual_seed(at)
    return torch.rand(()).item()


def own_seed(at: int) -> float:
    random.seed(at)
    return random.random()


def torch_put_back(at: int) -> float:
    with torch.random.fork_rng(devices=[]):
        return torch.rand(()).item()


DRAWS: dict[str, Draw] = {
    "nothing": float,
    "torch": lambda at: torch.rand(()).item(),
    "random": lambda at: random.random(),
    "numpy": lambda at: float(np.random.rand()),
    "both": lambda at: random.random() + float(np.random.rand()),
    "torch late": late(lambda at: torch.rand(()).item()),
    "pairs of torch's normal numbers late": late(lambda at: torch.randn(()).item()),
    "all of torch's words at once, late": late(lambda at: torch.rand(624).sum().item()),
    "torch, whose state is put back": torch_put_back,
    "torch, whose state is put back late": late(torch_put_back),
    "torch's last seed": lambda at: float(torch.initial_seed() % 2**52),
    "one decides about another late": late(lambda at: decided(at)),
    "in turn": in_turn,
    "random late": late(lambda at: random.random()),
    "numpy late": late(lambda at: float(np.random.rand())),
    "both late": late(lambda at: random.random() + float(np.random.rand())),
    "pairs of normal numbers": lambda at: float(np.random.randn()) + random.gauss(0, 1),
    "pairs of normal numbers late": late(lambda at: float(np.random.randn()) + random.gauss(0, 1)),
    "all words at once, late": late(lambda at: float(sum(np.random.bytes(4 * 624)))),
    "a seed of its own": own_seed,
    "a seed of its own late": late(own_seed),
    "a seed of its own for torch late": late(own_torch_seed),
}


class Drawing(Dataset[tuple[int, float]]):
    def __init__(self, draw: Draw) -> None:
        self.draw, self.fetched = draw, 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.fetched += 1
        return index, self.draw(index)


class InBulk(Drawing):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [self[index] for index in indices]


class ReadMany(Drawing):
    def read_many(self, indices: list[int]) -> list[int]:
        self.draw(indices[0])
        return indices

    def decode(self, raw: int) -> tuple[int, float]:
        return self[raw]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what lets all generators be seeded, as for workers that share them."""

    def switch() -> None:
        monkeypatch.setattr("headrace.worker.worker.Seeder", lambda shared: Seeder(shared=True))

    return switch


def read(dataset: Any, collate_fn: Callable[[list[Any]], Any] = list, **options: Any) -> list[Any]:
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, seed=3, collate_fn=collate_fn, **options)
    return [batch for _ in range(2) for batch in loader]


def noisy(samples: list[Any]) -> Any:
    return samples, torch.rand(()).item()


@pytest.mark.parametrize("collate_fn", [noisy, list])
@pytest.mark.parametrize("kind", [Drawing, InBulk, ReadMany])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_batches_are_those_of_generators_that_are_always_seeded(
    draw: Draw, kind: type[Drawing], collate_fn: Callable[[list[Any]], Any], always: Callable[[], None]
) -> None:
    found = read(kind(draw), collate_fn)
    always()
    assert found == read(kind(draw), collate_fn)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 3, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("name", ["both", "random late", "numpy late", "pairs of normal numbers late"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_agree_whenever_they_find_out(name: str, options: dict[str, Any]) -> None:
    assert read(Drawing(DRAWS[name]), **options) == read(Drawing(DRAWS[name]))


def test_collation_that_draws_late_is_found() -> None:
    def collate(samples: list[Any]) -> Any:
        return samples, random.random() if (17, 0.0) in samples else None

    def batches(**options: Any) -> list[Any]:
        return list(DataLoader(Drawing(lambda at: 0.0), BATCH_SIZE, seed=3, collate_fn=collate, **options))

    found = batches()
    assert found == batches(num_workers=1) == batches(num_workers=2)
    assert [drawn for _, drawn in found if drawn is not None]


class Watch:
    """Counts how often each generator is seeded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts = {"random": 0, "numpy": 0}
        for name, module in (("random", random), ("numpy", np.random)):
            monkeypatch.setattr(module, "seed", self._counting(name, module.seed))

    def _counting(self, name: str, seed: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any) -> None:
            self.counts[name] += 1
            seed(*arguments)

        return counted

    def taken(self) -> tuple[int, int]:
        taken = self.counts["random"], self.counts["numpy"]
        self.counts.update(random=0, numpy=0)
        return taken


def run(worker: Worker, step: int) -> Any:
    return worker.run(PlanTask(0, step))


def worker_of(draw: Draw, **options: Any) -> tuple[Worker, Drawing]:
    dataset = Drawing(draw)
    return Worker(Work(dataset, list, True, plan=Plan(Shuffled(), N, BATCH_SIZE, seed=3), **options)), dataset


def test_what_is_not_drawn_from_is_not_seeded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    worker, _ = worker_of(DRAWS["torch"])
    per_batch = BATCH_SIZE + 1  # the samples and the collation
    run(worker, 0)
    assert watch.taken() == (per_batch, per_batch)
    run(worker, 1)
    assert watch.taken() == (0, 0)


def test_torch_tells_the_seed_of_each_sample_though_its_state_is_not_computed() -> None:
    told: list[int] = []
    worker, _ = worker_of(lambda at: float(told.append(torch.initial_seed()) or 0.0))  # type: ignore[func-returns-value]
    run(worker, 0)
    state = seeding.torch_state()
    run(worker, 1)
    assert seeding.torch_state() == state
    plan = Plan(Shuffled(), N, BATCH_SIZE, seed=3)
    positions = [at for step in (0, 1) for at in plan.positions(0, step).tolist()]
    assert told == [words[0] for words in sample_seeds(3, 0, positions)]


def test_torch_is_always_seeded_where_its_state_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(Drawing(DRAWS["torch late"]))
    monkeypatch.setattr(seeding, "_TORCH", None)
    dataset = Drawing(DRAWS["torch late"])
    assert read(dataset) == found
    assert dataset.fetched == 2 * N, "nothing was computed again"


def test_only_the_generator_that_was_moved_is_seeded_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Plan(Shuffled(), N, BATCH_SIZE, seed=3)
    at = next(step for step in range(6) if 17 in order.batch(0, step).tolist())
    assert at > 0
    watch = Watch(monkeypatch)
    worker, dataset = worker_of(DRAWS["numpy late"])
    for step in range(at):
        run(worker, step)
    watch.taken()
    before = dataset.fetched
    run(worker, at)
    assert dataset.fetched == before + 2 * BATCH_SIZE, "the batch is computed again"
    python, numpy = watch.taken()
    assert (python, numpy) == (0, BATCH_SIZE + 1)
    run(worker, (at + 1) % 6)
    assert watch.taken() == (0, BATCH_SIZE + 1)
    assert dataset.fetched == before + 3 * BATCH_SIZE


def test_an_error_after_a_late_draw_is_that_of_the_seeded_batch() -> None:
    """Which error is raised may depend on what was drawn."""
    raised: list[str] = []

    def fail(at: int) -> float:
        if at == 17:
            raise ValueError(f"drew {random.random()}")
        return 0.0

    for _ in range(2):
        worker, _ = worker_of(fail)
        for step in range(6):
            try:
                run(worker, step)
            except ValueError as error:
                raised.append(str(error))
    fresh, _ = worker_of(fail)
    at = next(step for step in range(6) if 17 in Plan(Shuffled(), N, BATCH_SIZE, seed=3).batch(0, step).tolist())
    with pytest.raises(ValueError, match="drew") as caught:
        run(fresh, at)
    assert raised == [str(caught.value)] * 2


def test_an_error_in_the_first_batch_settles_nothing() -> None:
    def fail(at: int) -> float:
        if at == first:
            raise ValueError("broken")
        return random.random()

    first = int(Plan(Shuffled(), N, BATCH_SIZE, seed=3).batch(0, 0)[0])
    worker, _ = worker_of(fail)
    with pytest.raises(ValueError, match="broken"):
        run(worker, 0)
    other, _ = worker_of(fail)
    assert run(worker, 1) == run(other, 1)


def test_broken_samples_are_recorded_once_where_a_batch_is_computed_again() -> None:
    def broken(at: int) -> float:
        if at == 17:
            random.random()
            raise ValueError("broken")
        return 0.0

    loader = DataLoader(Drawing(broken), BATCH_SIZE, shuffle=True, seed=3, on_error="replace", collate_fn=list)
    assert len([sample for batch in loader for sample in batch]) == N
    assert loader.stats().replaced == 1


def test_workers_that_share_generators_always_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    worker, _ = worker_of(DRAWS["nothing"], in_threads=True)
    for step in range(3):
        run(worker, step)
    assert watch.taken() == (3 * (BATCH_SIZE + 1), 3 * (BATCH_SIZE + 1))


@pytest.mark.parametrize(
    ("state", "moves"),
    [
        (python_state, [random.random, lambda: random.getrandbits(1), lambda: random.seed(1)]),
        (torch_state, [lambda: torch.rand(()), lambda: torch.randn(()), lambda: torch.rand(624), torch.seed]),
        (numpy_state, [np.random.rand, lambda: np.random.bytes(4 * 624), lambda: np.random.seed(1)]),
    ],
    ids=["random", "torch", "numpy"],
)
@pytest.mark.parametrize("raw", [True, False])
def test_every_draw_moves_the_state(
    state: Callable[[], Any], moves: list[Callable[[], Any]], raw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not raw:  # as where the state's place in memory is not known
        for name in ("_TORCH", "_PYTHON", "_NUMPY"):
            monkeypatch.setattr(seeding, name, None)
    seed_from_words([1, 2, 3])
    for move in moves:
        before = state()
        assert state() == before
        move()
        assert state() != before


def test_the_state_is_read_from_memory_here() -> None:
    assert None not in (seeding._TORCH, seeding._PYTHON, seeding._NUMPY)


def put_back(at: int) -> float:
    before = random.getstate()
    drawn = random.random()
    random.setstate(before)
    return drawn


def test_a_draw_that_is_put_back_escapes() -> None:
    """The page says so, and `headrace verify` finds it."""
    (first, *rest), (other, *_) = read(Drawing(put_back)), read(Drawing(put_back), num_workers=2)
    assert first == other, "the first batch of a worker is always seeded"
    assert len({drawn for batch in rest[:5] for _, drawn in batch}) == 1, "from the second on all draw the same"
