"""The plan: every sample as often as the tail rule says, over any ranks, from any cursor, in any world."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.plan import Balanced, Order, Plan, Sequential, Shuffled, Subset, Weighted
from headrace.plan.plan import SUBSTITUTES
from headrace.types import TAILS, World

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)
WORLDS = st.tuples(st.integers(1, 9), st.integers(1, 8))
"""World size and batch size."""


class Case(NamedTuple):
    """An order over a dataset, and the words that key its epoch."""

    order: Order
    length: int
    seed: int
    epoch: int

    def plans(self, size: int, batch_size: int, **options: Any) -> list[Plan]:
        return [
            Plan(self.order, self.length, batch_size, World(rank, size), seed=self.seed, **options)
            for rank in range(size)
        ]

    def at(self, positions: Iterable[int]) -> list[int]:
        """The dataset indices at positions of the epoch."""
        return self.order.epoch(self.seed, self.epoch, self.length)(np.array(list(positions), np.int64)).tolist()

    def whole(self) -> list[int]:
        """The epoch's dataset indices in order."""
        return self.at(range(self.order.samples(self.length)))


@st.composite
def cases(draw: st.DrawFn, kinds: str = "sequential shuffled subset shuffled-subset") -> Case:
    """Epochs of 1 to 200 samples of one of the kinds of order."""
    samples = draw(st.integers(1, 200))
    kind = draw(st.sampled_from(kinds.split()))
    seed, epoch = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**40))
    chance = np.random.default_rng(samples)
    if kind == "weighted":
        return Case(Weighted(chance.integers(0, 5, 30) + 0.5, num_samples=samples), 30, seed, epoch)
    if kind == "balanced":
        return Case(Balanced(chance.integers(0, 5, 30), length=samples), 30, seed, epoch)
    if "subset" in kind:
        chosen = chance.permutation(samples + 20)[:samples]
        return Case(Subset(chosen, shuffle="shuffled" in kind), samples + 20, seed, epoch)
    return Case(Shuffled() if kind == "shuffled" else Sequential(), samples, seed, epoch)


EVERY_KIND = cases("sequential shuffled subset shuffled-subset weighted balanced")


def read_by(plans: list[Plan], epoch: int, cursor: int = 0) -> list[list[list[int]]]:
    """The positions each rank reads at each step: [rank][step][place]."""
    return [[plan.positions(epoch, step, cursor).tolist() for step in range(plan.steps(0, cursor))] for plan in plans]


def flat(batches: list[list[list[int]]]) -> list[int]:
    return [position for batch in chain(*batches) for position in batch]


@PROPERTY
@given(EVERY_KIND, WORLDS, st.data())
def test_exact_reads_each_position_once(case: Case, world: tuple[int, int], data: st.DataObject) -> None:
    plans = case.plans(*world, tail="exact")
    samples = plans[0].samples
    cursor = data.draw(st.integers(0, samples))
    read = read_by(plans, case.epoch, cursor)
    assert sorted(flat(read)) == list(range(cursor, samples))
    if not isinstance(case.order, Balanced):
        assert all(position % world[0] == rank for rank in range(world[0]) for position in flat(read[rank : rank + 1]))
    shares = [sum(map(len, rank)) for rank in read]
    assert max(shares) - min(shares) <= 1
    assert shares == [plan.share(0, cursor) for plan in plans]
    steps = [len(rank) for rank in read]
    assert max(steps) - min(steps) <= 1
    assert all(len(batch) == world[1] for rank in read for batch in rank[:-1])
    assert all(0 < len(rank[-1]) <= world[1] for rank in read if rank)


@PROPERTY
@given(EVERY_KIND, WORLDS, st.data())
def test_pad_gives_every_rank_the_same_steps(case: Case, world: tuple[int, int], data: st.DataObject) -> None:
    plans = case.plans(*world, tail="pad")
    samples = plans[0].samples
    cursor = data.draw(st.integers(0, samples))
    read = read_by(plans, case.epoch, cursor)
    pads = -(samples - cursor) % world[0]
    assert sorted(flat(read)) == list(range(cursor, samples + pads)), "each once, and just the pads beyond"
    assert len({tuple(map(len, rank)) for rank in read}) == 1, "equal sizes at each step"
    assert all(len(batch) == world[1] for rank in read for batch in rank[:-1])
    assert {plan.share(0, cursor) for plan in plans} == {-(-(samples - cursor) // world[0])}
    assert {plan.end(0, cursor) for plan in plans} == {samples + pads}
    if not isinstance(case.order, Weighted | Balanced):
        wrapped = (case.whole() * (pads // samples + 1))[:pads]
        assert case.at(range(samples, samples + pads)) == wrapped


@PROPERTY
@given(EVERY_KIND, WORLDS, st.data())
def test_drop_reads_whole_global_batches_only(case: Case, world: tuple[int, int], data: st.DataObject) -> None:
    plans = case.plans(*world, tail="drop")
    cursor = data.draw(st.integers(0, plans[0].samples))
    read = read_by(plans, case.epoch, cursor)
    steps = (plans[0].samples - cursor) // (world[0] * world[1])
    assert {len(rank) for rank in read} == {steps}
    assert all(len(batch) == world[1] for rank in read for batch in rank)
    assert sorted(flat(read)) == list(range(cursor, cursor + steps * world[0] * world[1]))


@PROPERTY
@given(cases(), WORLDS, st.sampled_from(TAILS))
def test_every_sample_is_read(case: Case, world: tuple[int, int], tail: Any) -> None:
    """What the positions promise holds for the dataset's samples."""
    plans = case.plans(*world, tail=tail)
    read = Counter(
        index for plan in plans for step in range(plan.steps(0)) for index in plan.batch(case.epoch, step).tolist()
    )
    expected = set(case.order.indices.tolist()) if isinstance(case.order, Subset) else set(range(case.length))
    if tail == "exact":
        assert read == Counter(expected)
    elif tail == "pad":
        assert set(read) == expected
        assert read.total() == len(expected) + -len(expected) % world[0]
    else:
        assert set(read) <= expected
        assert set(read.values()) <= {1}


def global_batches(plans: list[Plan], epoch: int, cursor: int) -> Iterator[Counter[int]]:
    """The multiset of dataset indices in each global batch, pads aside."""
    for step in range(max(plan.steps(0, cursor) for plan in plans)):
        read: Counter[int] = Counter()
        for plan in plans:
            if step < plan.steps(0, cursor):
                positions = plan.positions(epoch, step, cursor)
                batch = plan.batch(epoch, step, cursor)
                assert batch.tolist() == plan.indices(epoch, positions).tolist()
                read.update(batch[positions < plan.samples].tolist())
        yield read


@PROPERTY
@given(EVERY_KIND, st.sampled_from([1, 2, 6, 8, 12, 36]), st.sampled_from(TAILS), st.booleans(), st.data())
def test_a_global_batch_does_not_depend_on_the_world(
    case: Case, global_batch: int, tail: Any, in_runs: bool, data: st.DataObject
) -> None:
    whole = case.whole()
    cursor = data.draw(st.integers(0, len(whole)))
    stop = len(whole) - (len(whole) - cursor) % global_batch if tail == "drop" else len(whole)
    expected = [Counter(whole[start : min(start + global_batch, stop)]) for start in range(cursor, stop, global_batch)]
    for size in (size for size in range(1, 10) if global_batch % size == 0):
        plans = case.plans(size, global_batch // size, tail=tail, in_runs=in_runs)
        assert list(global_batches(plans, case.epoch, cursor)) == expected


@PROPERTY
@given(
    EVERY_KIND,
    st.lists(st.tuples(WORLDS, st.integers(0, 6), st.booleans()), max_size=4),
    WORLDS,
    st.sampled_from(["pad", "exact"]),
)
def test_an_epoch_goes_on_in_any_other_world(
    case: Case, runs: list[tuple[tuple[int, int], int, bool]], last: tuple[int, int], tail: Any
) -> None:
    """Runs of a few steps, each from where the one before stopped, then the rest: the epoch, nothing twice."""
    cursor, read = 0, []
    for world, wanted, in_runs in runs:
        plans = case.plans(*world, tail=tail, in_runs=in_runs)
        steps = min(wanted, max(plan.steps(0, cursor) for plan in plans))
        read += [
            position for rank in read_by(plans, case.epoch, cursor) for batch in rank[:steps] for position in batch
        ]
        afters = {plan.cursor_after(0, steps - 1, cursor) if steps else cursor for plan in plans}
        assert len(afters) == 1, "the same on every rank"
        cursor = afters.pop()
        assert sorted(position for position in read if position < plans[0].samples) == list(range(cursor))
    plans = case.plans(*last, tail=tail)
    read += flat(read_by(plans, case.epoch, cursor))
    unpadded = sorted(position for position in read if position < plans[0].samples)
    assert unpadded == list(range(plans[0].samples))
    assert sorted(case.at(unpadded)) == sorted(case.whole())


@PROPERTY
@given(EVERY_KIND, WORLDS, st.sampled_from(TAILS), st.data())
def test_cursor_after(case: Case, world: tuple[int, int], tail: Any, data: st.DataObject) -> None:
    """Each step adds a global batch; the last one, and whatever comes after, ends the epoch."""
    plan = case.plans(*world, tail=tail)[0]
    cursor = data.draw(st.integers(0, plan.samples))
    steps = max(other.steps(0, cursor) for other in case.plans(*world, tail=tail))
    after = [plan.cursor_after(0, step, cursor) for step in range(steps + 2)]
    step_samples = world[0] * world[1]
    assert after[: max(steps - 1, 0)] == [cursor + (step + 1) * step_samples for step in range(steps - 1)]
    assert set(after[max(steps - 1, 0) :]) == {plan.samples}
    assert [plan.steps(0, plan.samples), plan.share(0, plan.samples)] == [0, 0]


@PROPERTY
@given(EVERY_KIND, WORLDS, st.sampled_from(TAILS), st.booleans(), st.data())
def test_a_step_has_as_many_samples_as_it_says(
    case: Case, world: tuple[int, int], tail: Any, in_runs: bool, data: st.DataObject
) -> None:
    plans = case.plans(*world, tail=tail, in_runs=in_runs)
    cursor = data.draw(st.integers(0, plans[0].samples))
    sizes = [[plan.size(0, step, cursor) for step in range(plan.steps(0, cursor))] for plan in plans]
    assert sizes == [[*map(len, rank)] for rank in read_by(plans, case.epoch, cursor)]


@pytest.mark.parametrize("kinds", ["sequential shuffled subset shuffled-subset weighted", "balanced"])
@PROPERTY
@given(data=st.data(), world=WORLDS, tail=st.sampled_from(TAILS))
def test_runs_are_another_dealing_of_the_same_global_batches(
    kinds: str, world: tuple[int, int], tail: Any, data: st.DataObject
) -> None:
    """The ranks' batches laid end to end are the epoch's order, with the pads at the end."""
    case = data.draw(cases(kinds))
    cursor = data.draw(st.integers(0, case.order.samples(case.length)))
    plans = case.plans(*world, tail=tail, in_runs=True)
    in_turn, in_runs = (
        read_by([replace(plan, in_runs=runs) for plan in plans], case.epoch, cursor) for runs in (False, True)
    )
    assert [sum(map(len, rank)) for rank in in_runs] == [plan.share(0, cursor) for plan in plans]
    end, stop = plans[0].end(0, cursor), cursor
    assert {plan.end(0, cursor) for plan in plans} == {end}
    for step in range(max(map(len, in_turn))):
        gathered, others = ([rank[step] for rank in read if step < len(rank)] for read in (in_runs, in_turn))
        start, stop = stop, min(stop + world[0] * world[1], end)
        assert sorted(chain(*gathered)) == sorted(chain(*others)) == list(range(start, stop))
        if not isinstance(case.order, Balanced) or stop > case.order.samples(case.length):
            assert list(chain(*gathered)) == list(range(start, stop))
            sizes = [len(rank[step]) if step < len(rank) else 0 for rank in in_runs]
            assert sizes == sorted(sizes, reverse=True), "the first ranks have one more"
            assert sizes[0] - sizes[-1] <= 1
        else:
            assert gathered == others, "it keeps a deal of its own"
    assert stop == end


@PROPERTY
@given(EVERY_KIND, WORLDS, st.sampled_from(TAILS), st.booleans(), st.data())
def test_a_span_is_its_steps(case: Case, world: tuple[int, int], tail: Any, in_runs: bool, data: st.DataObject) -> None:
    plans = case.plans(*world, tail=tail, in_runs=in_runs)
    cursor = data.draw(st.integers(0, plans[0].samples))
    most = data.draw(st.integers(1, 9))
    for plan, steps in zip(plans, read_by(plans, case.epoch, cursor), strict=True):
        for step in range(len(steps)):
            positions, indices = plan.span(case.epoch, step, cursor, most)
            few = 1 if isinstance(case.order, Balanced) else most
            assert positions.tolist() == [*chain(*steps[step : step + few])]
            assert indices.tolist() == plan.indices(case.epoch, positions).tolist()


def test_runs_literally() -> None:
    plans = Case(Sequential(), 9, 0, 0).plans(4, 4, in_runs=True)
    assert read_by(plans, 0) == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]], [[9, 10, 11]]]
    assert read_by([replace(plan, in_runs=False) for plan in plans], 0)[0] == [[0, 4, 8]]
    plans = Case(Sequential(), 11, 0, 0).plans(2, 4, in_runs=True)
    assert read_by(plans, 0) == [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], [10, 11]]]
    plans = Case(Sequential(), 11, 0, 0).plans(2, 4, in_runs=True, tail="exact")
    assert read_by(plans, 0) == [[[0, 1, 2, 3], [8, 9]], [[4, 5, 6, 7], [10]]]


@pytest.mark.parametrize(
    ("length", "size", "tail", "batches"),
    [
        (11, 4, "pad", [[[0, 4], [8]], [[1, 5], [9]], [[2, 6], [10]], [[3, 7], [11]]]),
        (11, 4, "drop", [[[0, 4]], [[1, 5]], [[2, 6]], [[3, 7]]]),
        (11, 4, "exact", [[[0, 4], [8]], [[1, 5], [9]], [[2, 6], [10]], [[3, 7]]]),
        (3, 5, "pad", [[[0]], [[1]], [[2]], [[3]], [[4]]]),
        (3, 5, "drop", [[], [], [], [], []]),
        (3, 5, "exact", [[[0]], [[1]], [[2]], [], []]),
    ],
)
def test_the_documented_shares(length: int, size: int, tail: Any, batches: list[list[list[int]]]) -> None:
    """With a batch size of 2; and every row of the table stands in the docstring."""
    plans = Case(Sequential(), length, 0, 0).plans(size, 2, tail=tail)
    assert read_by(plans, 0) == batches
    assert [plan.steps(0) for plan in plans] == [len(rank) for rank in batches]
    assert [[plan.batch(0, step).tolist() for step in range(plan.steps(0))] for plan in plans] == [
        [[position % length for position in batch] for batch in rank] for rank in batches
    ]
    if length == 11:
        cells = " | ".join(" ".join(map(str, rank)) for rank in batches)
        assert f'| `"{tail}"` | {cells} |' in (Plan.__doc__ or "")


def test_a_step_out_of_range() -> None:
    plans = Case(Sequential(), 11, 0, 0).plans(4, 2, tail="exact")
    for rank, step, cursor, text in [
        (1, 2, 0, "step 2 is out of range: rank 1 of 4 has 2 steps from position 0 of 11"),
        (3, 1, 0, "step 1 is out of range: rank 3 of 4 has 1 steps from position 0 of 11"),
        (0, -1, 0, "step -1 is out of range: rank 0 of 4 has 2 steps from position 0 of 11"),
        (0, -1, 8, "step -1 is out of range: rank 0 of 4 has 1 steps from position 8 of 11"),
        (0, 0, 11, "step 0 is out of range: rank 0 of 4 has 0 steps from position 11 of 11"),
        (0, 10**15, 3, "step 1000000000000000 is out of range: rank 0 of 4 has 1 steps from position 3 of 11"),
    ]:
        for read in (plans[rank].positions, plans[rank].batch):
            with pytest.raises(IndexError) as caught:
                read(0, step, cursor)
            assert str(caught.value) == text
    for tail in ("pad", "drop"):
        with pytest.raises(IndexError, match="has 0 steps from position 11 of 11"):
            replace(plans[0], tail=tail, in_runs=True).positions(0, 0, 11)


@pytest.mark.parametrize("cursor", [-1, -8, 12, 100])
def test_a_cursor_out_of_range(cursor: int) -> None:
    text = rf"cursor={cursor} is not allowed: expected an integer in \[0, 11\]\. It counts the epoch's samples"
    for tail, in_runs in product(TAILS, (False, True)):
        plan = Plan(Sequential(), 11, 1, World(1, 2), tail, in_runs=in_runs)
        for ask, arguments in [(plan.share, (0,)), (plan.steps, (0,)), (plan.positions, (0, 0)), (plan.batch, (0, 0))]:
            with pytest.raises(ValueError, match=text):
                ask(*arguments, cursor)  # type: ignore[operator]


@pytest.mark.parametrize("order", [Sequential(), Shuffled(), Subset([0]), Weighted([1]), Balanced([1])])
def test_an_empty_dataset(order: Order) -> None:
    text = r"len\(dataset\)=0 is not allowed: expected an integer >= 1\. An empty dataset has no order; check the path"
    for tail in TAILS:
        with pytest.raises(ValueError, match=text):
            Plan(order, 0, tail=tail)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"batch_size": 0},
            ValueError,
            "batch_size=0 is not allowed: expected an integer >= 1. Count samples per rank",
        ),
        ({"batch_size": 1.0}, TypeError, r"batch_size=1\.0 is not allowed.*got float"),
        ({"batch_size": True}, TypeError, "batch_size=True is not allowed.*got bool"),
        ({"seed": -1}, ValueError, "seed=-1 is not allowed: expected an integer in"),
        ({"seed": 2**64}, ValueError, f"seed={2**64} is not allowed"),
        ({"tail": "wrap"}, ValueError, r"tail='wrap' is not allowed: expected one of \('pad', 'drop', 'exact'\)"),
        ({"length": 7.0}, TypeError, r"len\(dataset\)=7\.0 is not allowed"),
    ],
)
def test_plan_errors(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Plan(**({"order": Sequential(), "length": 10} | options))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_numpy_integers_are_integers(dtype: Any) -> None:
    """They are accepted, so they must not overflow or wrap round where plain ones do not."""
    plain = Plan(Sequential(), 100, 50, World(1, 4), seed=3)
    plan = Plan(Sequential(), dtype(100), dtype(50), World(1, 4), seed=dtype(3))
    assert plan.steps(0) == plain.steps(0) == 1
    assert plan.positions(0, 0).tolist() == plain.positions(0, 0).tolist()
    assert (plan.global_batch, plan.end(0), plan.cursor_after(0, 0)) == (200, 100, 100)


@PROPERTY
@given(EVERY_KIND, WORLDS, st.integers(0, 250))
def test_substitutes_are_other_samples_of_the_epoch_whoever_asks(
    case: Case, world: tuple[int, int], position: int
) -> None:
    first, *ranks = case.plans(*world, tail="exact")
    substitutes = first.substitutes(case.epoch, position)
    assert all(plan.substitutes(case.epoch, position) == substitutes for plan in ranks)
    assert Plan(case.order, case.length, 3, seed=case.seed).substitutes(case.epoch, position) == substitutes
    others = set(case.whole()) - set(case.at([position]))
    assert len(set(substitutes)) == len(substitutes)
    assert set(substitutes) <= others
    if case.order.samples(case.length) <= SUBSTITUTES:
        assert set(substitutes) == others, "few are all found"
    elif case.order.samples(case.length) > 2 * SUBSTITUTES and not isinstance(case.order, Weighted | Balanced):
        assert len(substitutes) == SUBSTITUTES


def test_substitutes_are_spread_over_the_epoch() -> None:
    plan = Plan(Sequential(), 50, seed=1)
    asked = product(range(40), range(50))
    counts = Counter(chain.from_iterable(plan.substitutes(epoch, position) for epoch, position in asked))
    assert min(counts.values()) > 250, "of 320 each"
    assert max(counts.values()) < 390
