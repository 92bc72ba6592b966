"""Substitutes for samples that cannot be fetched."""

from collections import Counter
from itertools import chain, product

from hypothesis import given
from hypothesis import strategies as st

from headrace.plan import Balanced, Plan, Sequential, Weighted
from headrace.plan.plan import SUBSTITUTES
from plan.plan_cases import EVERY_KIND, PROPERTY, WORLDS, Case


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
