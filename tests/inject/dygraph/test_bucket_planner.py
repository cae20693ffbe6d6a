"""How buckets are planned from the first backwards of a model, timed by a fake clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleetrun.inject.dygraph.bucket_planner import BucketPlanner
from fleetrun.strategy.fields import PLAN_UPDATES

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES, AUTO = [1000] * 4, [[0, 1], [2, 3]]
MOST, ALL = [[0, 1, 2], [3]], [[0, 1, 2, 3]]


class Training:
    """Runs backwards: one gradient per millisecond; SECONDS gives the time that buckets take."""

    def __init__(
        self, seconds: Callable[[list[list[int]]], float], cost_us: tuple[int, int]
    ) -> None:
        self.now = 0.0
        self.buckets: list[list[int]] = AUTO
        self.seconds = seconds
        self.decisions = 0
        self.planner = BucketPlanner(
            lambda numbers: [2 * number for number in numbers],
            2,
            self.decide,
            lambda _: [(1000, cost_us[0]), (11000, cost_us[0] + 10 * cost_us[1])],
            clock=lambda: self.now,
        )

    def decide(self, _planner: BucketPlanner) -> None:
        """Count."""
        self.decisions += 1

    def run(
        self, backwards: int = PLAN_UPDATES, *, misses: int = -1, limit_count: int | None = None
    ) -> None:
        """Run up to BACKWARDS backwards, until there is a decision."""
        for number in range(backwards):
            if not self.planner.is_on:
                return
            self.planner.begin()
            ready: list[float | None] = [self.now + delay_ms / 1000 for delay_ms in range(1, 5)]
            if number == misses:
                ready[2] = None
            self.now += self.seconds(self.buckets)
            replanned = self.planner.finish(ready, SIZES, ["a"] * 4, AUTO, limit_count)
            self.buckets = replanned or self.buckets


# If starts cost nothing, the last gradient is sent alone; if they are slow, all go together.
@pytest.mark.parametrize(("cost_us", "best"), [((100, 100), MOST), ((9000, 1), ALL)])
def test_the_plan_that_is_seen_to_be_fastest_is_kept(
    cost_us: tuple[int, int], best: list[list[int]]
) -> None:
    training = Training(lambda buckets: 0.01 if buckets == best else 0.02, cost_us)
    training.run()
    assert training.buckets == best
    outcome = training.planner.outcome
    assert outcome is not None
    assert (outcome.chosen, outcome.planned) == ("plan", len(best))
    assert outcome.seen_s["auto"] == pytest.approx(0.02)
    assert outcome.seen_s["plan"] == pytest.approx(0.01)
    assert outcome.bytes_chosen == tuple(1000 * len(bucket) for bucket in best)
    assert training.decisions == 1


def test_what_is_not_faster_than_the_default_does_not_replace_it() -> None:
    training = Training(lambda _: 0.01, (100, 100))
    training.run()
    assert training.buckets == AUTO
    assert training.planner.outcome is not None
    assert training.planner.outcome.chosen == "auto"


def test_one_bucket_is_kept_where_it_is_faster_than_what_was_planned() -> None:
    training = Training(lambda buckets: len(buckets) / 100, (100, 100))
    training.run()
    assert training.buckets == ALL
    assert training.planner.outcome is not None
    assert training.planner.outcome.chosen == "one"
    assert "planned 2 buckets" in training.planner.outcome.describe()


def test_smaller_buckets_are_kept_where_starts_turn_out_to_cost_less_than_measured() -> None:
    # By the measured cost, two buckets end soonest.
    training = Training(lambda buckets: 0.01 if len(buckets) == 3 else 0.02, (1900, 300))
    training.run()
    outcome = training.planner.outcome
    assert outcome is not None
    assert len(training.buckets) == outcome.planned == 3
    assert outcome.chosen == "plan"
    assert outcome.seen_s["plan"] == pytest.approx(0.01)
    assert outcome.bytes_chosen == tuple(1000 * len(bucket) for bucket in training.buckets)


def test_a_plan_that_is_the_default_is_not_tried() -> None:
    # Two and two end as soon as one by one, with fewer starts.
    training = Training(lambda _: 0.01, (1500, 0))
    training.run(8, limit_count=2)
    outcome = training.planner.outcome
    assert outcome is not None
    assert (outcome.chosen, outcome.seen_s) == ("plan", {})


def test_gradients_that_do_not_always_come_are_not_planned() -> None:
    training = Training(lambda _: 0.01, (100, 100))
    training.run(misses=4)
    assert training.planner.failure == "not every backward computes all gradients"
    assert training.buckets == AUTO
    assert training.decisions == 1


def test_what_no_backward_has_begun_is_not_timed() -> None:
    training = Training(lambda _: 0.01, (100, 100))
    assert training.planner.finish([None] * 4, SIZES, ["a"] * 4, AUTO, None) is None
    training.run()
    assert training.planner.outcome is not None
