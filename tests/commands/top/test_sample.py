"""Samples of top: which ranks lag, and the time that is left."""

from __future__ import annotations

from fleetrun.commands.top import sample
from fleetrun.commands.top.sample import RankRow


def a_row(rank: int, state: str, step: int | None) -> RankRow:
    return RankRow(f"rank {rank}", rank, state, "", "cpu", 1, step=step)


def test_ranks_that_stand_still_are_compared_by_their_steps() -> None:
    rows = [a_row(0, "silent 30s", 120), a_row(1, "silent 30s", 100), a_row(2, "silent 30s", 110)]
    compared = [(row.state, row.is_odd) for row in sample.compared(rows)]
    assert compared == [("waits 30s", False), ("behind 30s", True), ("silent 30s", False)]


def test_the_time_that_is_left_is_unknown_while_a_rank_is_silent() -> None:
    def training(step: int, steps_per_s: float | None) -> RankRow:
        row = a_row(0, "running", step)
        return row._replace(total_steps=60, steps_per_s=steps_per_s)

    assert sample.eta_s([training(44, 2.0), training(20, 1.0)]) == 40
    assert sample.eta_s([training(44, 2.0), training(8, 0.0)]) is None
    # It has made its last step, and only waits for the others.
    assert sample.eta_s([training(44, 2.0), training(60, 0.0)]) == 8
    assert sample.eta_s([training(44, None)]) is None
