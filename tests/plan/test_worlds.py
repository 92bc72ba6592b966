"""Global batches do not depend on the world, and an epoch goes on in any other one."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Plan
from headrace.types import TAILS
from plan.plan_cases import EVERY_KIND, PROPERTY, WORLDS, Case, flat, read_by


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
