"""The layout of collective training."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetrun.model import Endpoint, Member, Roster
from fleetrun.plan.modes.collective import ranks


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
