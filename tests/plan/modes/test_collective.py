"""The layout of collective training."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from planning import gpus

from fleetrun.model import Endpoint, Member, RankSpec, Roster
from fleetrun.plan.modes.collective import ranks


def test_ranks_follow_hosts() -> None:
    members = (Member("a", (1,), (gpus(0, 1),)), Member("b", (5, 6), ((), ())))
    assert ranks(Roster(members, 1, Endpoint("a", 9))) == (
        RankSpec("TRAINER", 0, 0, 0, gpus(0, 1), Endpoint("a", 1)),
        RankSpec("TRAINER", 1, 0, 1, (), Endpoint("b", 5)),
        RankSpec("TRAINER", 2, 1, 1, (), Endpoint("b", 6)),
    )


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_ranks_are_contiguous_whatever_each_host_has(sizes: list[int]) -> None:
    members = tuple(
        Member(f"h{node}", tuple(range(1, size + 1)), ((),) * size)
        for node, size in enumerate(sizes)
    )
    specs = ranks(Roster(members, 0, Endpoint("h0", 99)))
    assert [spec.rank for spec in specs] == list(range(sum(sizes)))
    assert [spec.node_rank for spec in specs] == sorted(spec.node_rank for spec in specs)
    for node, size in enumerate(sizes):
        mine = [spec.local_rank for spec in specs if spec.node_rank == node]
        assert mine == list(range(size))
