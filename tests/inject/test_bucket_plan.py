"""Buckets that are planned from measured times."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.inject.bucket_plan import AllReduceCost, end_s, fit, plan

SECONDS = st.floats(0, 10, allow_nan=False)
GRADIENTS = st.lists(
    st.tuples(st.integers(1, 100), st.sampled_from("aaab"), SECONDS), min_size=1, max_size=9
)
COSTS = st.builds(AllReduceCost, SECONDS, st.floats(0, 1, allow_nan=False))
# Costs that clocks can resolve.
REAL_COSTS = st.builds(AllReduceCost, st.floats(1e-6, 1), st.floats(1e-9, 1e-3))


def partitions(kinds: list[str], limit: int | None) -> list[list[list[int]]]:
    """Return every partition of the gradients into buckets of neighbours of one kind."""
    count = len(kinds)
    plans = []
    for cuts in itertools.product((False, True), repeat=count - 1):
        places = [0, *(place + 1 for place, cut in enumerate(cuts) if cut), count]
        buckets = [list(range(begin, end)) for begin, end in itertools.pairwise(places)]
        if all(
            len({kinds[gradient] for gradient in bucket}) == 1 and len(bucket) <= (limit or count)
            for bucket in buckets
        ):
            plans.append(buckets)
    return plans


@given(GRADIENTS, COSTS, st.one_of(st.none(), st.integers(1, 4)))
def test_no_other_buckets_end_the_step_sooner(
    gradients: list[tuple[int, str, float]], cost: AllReduceCost, limit: int | None
) -> None:
    sizes, kinds, ready = ([gradient[place] for gradient in gradients] for place in range(3))
    planned = plan(sizes, kinds, ready, cost, limit_count=limit)  # type: ignore[arg-type]
    every = partitions(kinds, limit)  # type: ignore[arg-type]
    assert planned in every
    ends = [end_s(buckets, sizes, ready, cost) for buckets in every]  # type: ignore[arg-type]
    assert end_s(planned, sizes, ready, cost) == pytest.approx(min(ends))  # type: ignore[arg-type]


@given(GRADIENTS)
def test_free_starts_leave_no_gradient_waiting_and_free_bytes_make_one_bucket(
    gradients: list[tuple[int, str, float]],
) -> None:
    sizes, ready = (
        [gradient[0] for gradient in gradients],
        sorted(gradient[2] for gradient in gradients),
    )
    alone = [[index] for index in range(len(sizes))]
    soonest = end_s(alone, sizes, ready, AllReduceCost(0.0, 0.01))
    planned = plan(sizes, "a" * len(sizes), ready, AllReduceCost(0.0, 0.01))
    assert end_s(planned, sizes, ready, AllReduceCost(0.0, 0.01)) == pytest.approx(soonest)
    assert plan(sizes, "a" * len(sizes), ready, AllReduceCost(1.0, 0.0))[-1][-1] == len(sizes) - 1
    together = plan(sizes, "a" * len(sizes), [0.0] * len(sizes), AllReduceCost(1.0, 0.01))
    assert together == [list(range(len(sizes)))]


@given(REAL_COSTS, st.sets(st.integers(1, 10**6), min_size=2, max_size=5))
def test_a_cost_is_found_from_exact_samples(cost: AllReduceCost, sizes: set[int]) -> None:
    fitted = fit([(size, cost.of(size)) for size in sizes])
    for size in sizes:
        assert fitted.of(size) == pytest.approx(cost.of(size), rel=1e-3, abs=1e-9)


def test_samples_that_say_nothing_cost_nothing() -> None:
    assert fit([]) == AllReduceCost(0.0, 0.0)
    assert fit([(1000, 0.5)]) == AllReduceCost(0.5, 0.0)
    # Smaller samples may have been disturbed.
    assert fit([(1000, 0.5), (2000, 0.1)]).byte_s == 0.0
    assert fit([(1000, 0.1), (2000, 0.5)]).startup_s == 0.0
