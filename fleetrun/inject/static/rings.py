"""The communicators that buckets go over: one after the other, and in two levels if asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import settings
from . import gloo, lanes, reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..evidence import Evidence

# Paddle's own strategies count from 0.
_FIRST = 100


class Way(NamedTuple):
    """How a bucket is summed: over the ring of all, or in the group, among the leaders, back."""

    ring: int
    # The ring of this rank's group, -1 where there is one level only.
    inner: int = -1
    # Whether this rank speaks for its group.
    leads: bool = False
    # What sums it in place of Paddle's operators.
    lane: lanes.Lane | None = None


def open_rings(startup: Any, fleet: Any, proof: Evidence) -> list[Way]:
    """Make the communicators that the strategy asks for; all ranks call it alike."""
    ranks, size = fleet.worker_num(), reading.group_size(fleet.worker_num())
    groups = [range(at, min(at + size, ranks)) for at in range(0, ranks, size)]
    if size > 1:
        proof.counts["groups"] = [list(group) for group in groups]
    if gloo.is_used():
        if size == 1 and reading.rings() == 1:
            return [Way(0)]
        own = lanes.open_lanes(fleet.worker_index(), ranks, size=size, number=reading.rings())
        return [Way(lane.rings[-1], lane=lane) for lane in own]
    ways = []
    for number in range(reading.rings()):
        first = _FIRST + number * (len(groups) + 1)
        if size == 1:
            ring = 0 if number == 0 else first
            if ring:
                _open(startup, fleet, ring, range(ranks))
            ways.append(Way(ring))
            continue
        mine = fleet.worker_index() // size
        # Each group has a number of its own: the keys in the store must not meet.
        _open(startup, fleet, first + 1 + mine, groups[mine])
        leaders = [group[0] for group in groups]
        leads = fleet.worker_index() in leaders
        if leads:
            _open(startup, fleet, first, leaders)
        ways.append(Way(first, first + 1 + mine, leads))
    return ways


def reduce_over(way: Way, carried: Any, allreduce: str) -> list[dict[str, Any]]:
    """Return the operators that sum CARRIED over all ranks."""
    if way.inner < 0:
        return [_sum(carried, allreduce, way.ring)]
    ops = []
    old = allreduce.startswith("c_")
    entry, exit_ = ("X", "Out") if old else ("x", "out")
    wires = {"inputs": {entry: carried}, "outputs": {exit_: carried}}
    reduce_attrs = {"ring_id": way.inner, "root_id": 0}
    if not old:
        reduce_attrs["reduce_type"] = _sum(carried, allreduce, 0)["attrs"]["reduce_type"]
    ops.append({"type": "c_reduce_sum" if old else "reduce", **wires, "attrs": reduce_attrs})
    if way.leads:
        ops.append(_sum(carried, allreduce, way.ring))
    root = {"ring_id": way.inner, "root": 0}
    ops.append({"type": "c_broadcast" if old else "broadcast", **wires, "attrs": root})
    return ops


def _sum(carried: Any, allreduce: str, ring: int) -> dict[str, Any]:
    attrs: dict[str, Any] = {"ring_id": ring}
    if allreduce.startswith("c_"):
        attrs["use_calc_stream"] = reading.waits() or bool(
            settings.effective("calc_comm_same_stream")
        )
        return {
            "type": allreduce,
            "inputs": {"X": carried},
            "outputs": {"Out": carried},
            "attrs": attrs,
        }
    import paddle

    attrs["reduce_type"] = paddle.distributed.ReduceOp.SUM
    return {
        "type": allreduce,
        "inputs": {"x": carried},
        "outputs": {"out": carried},
        "attrs": attrs,
    }


def _open(startup: Any, fleet: Any, ring: int, ranks: Sequence[int]) -> None:
    common: Any = sys.modules["paddle.distributed.fleet.meta_optimizers.common"]
    endpoints = fleet.worker_endpoints()
    rank = fleet.worker_index()
    common.CollectiveHelper(fleet._role_maker, wait_port=False)._init_communicator(
        startup,
        endpoints[rank],
        [endpoints[each] for each in ranks],
        list(ranks).index(rank),
        ring,
        False,
        ring,
        True,
    )
