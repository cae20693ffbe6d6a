"""Opens the communicators for buckets, used round-robin, with one level or two."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import settings
from ..evidence import REFUSED
from . import settings_view
from .cpu import channels, gloo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..evidence import Evidence

# See SetDeviceCommContext of Paddle 3's executor: `if (!dev_ctx->GetCommContext())`. The leaders'
# sum would be matched with the others' next collective.
ONE_COMMUNICATOR = (
    "on GPUs, Paddle 3 runs all rings of an older static program over the first communicator, so "
    "groups would wait for each other forever"
)
# Paddle's own strategies count from 0.
_FIRST = 100


class BucketRings(NamedTuple):
    """The rings that sum a bucket: one ring of all ranks, or the group's ring and the leaders'."""

    ring: int
    # The ring of this rank's group, -1 with one level.
    inner: int = -1
    # Whether this rank is the leader of its group.
    is_leader: bool = False
    # On CPUs: the channel that sums in place of Paddle's operators.
    channel: channels.Channel | None = None


def open_rings(startup: Any, fleet: Any, proof: Evidence) -> list[BucketRings]:
    """Open the communicators that the strategy requests; all ranks must call this."""
    ranks, size = fleet.worker_num(), settings_view.group_size(fleet.worker_num())
    groups = [range(at, min(at + size, ranks)) for at in range(0, ranks, size)]
    if size > 1:
        proof.counts["groups"] = [list(group) for group in groups]
    if gloo.is_used():
        if size == 1 and settings_view.rings() == 1:
            return [BucketRings(0)]
        opened = channels.open_channels(
            fleet.worker_index(), ranks, size=size, number=settings_view.rings()
        )
        return [BucketRings(channel.rings[-1], channel=channel) for channel in opened]
    if size > 1 and not has_communicator_for_each_ring():
        for name in ("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks"):
            proof.field(name, REFUSED, reason=ONE_COMMUNICATOR)
        proof.note(ONE_COMMUNICATOR)
        proof.write()
        raise RuntimeError(f"use_hierarchical_allreduce: {ONE_COMMUNICATOR}.")
    communicators = []
    for number in range(settings_view.rings() if has_communicator_for_each_ring() else 1):
        first = _FIRST + number * (len(groups) + 1)
        if size == 1:
            ring = 0 if number == 0 else first
            if ring:
                _open(startup, fleet, ring, range(ranks))
            communicators.append(BucketRings(ring))
            continue
        own_group = fleet.worker_index() // size
        # Each group has its own number, so that the keys in the store differ.
        _open(startup, fleet, first + 1 + own_group, groups[own_group])
        leaders = [group[0] for group in groups]
        is_leader = fleet.worker_index() in leaders
        if is_leader:
            _open(startup, fleet, first, leaders)
        communicators.append(BucketRings(first, first + 1 + own_group, is_leader))
    return communicators


def has_communicator_for_each_ring() -> bool:
    """Whether rings on GPUs have their own communicators."""
    paddle: Any = sys.modules["paddle"]
    return str(paddle.__version__).startswith("2.")


def reduce_over(communicator: BucketRings, carried: Any, allreduce: str) -> list[dict[str, Any]]:
    """Return the operators that sum CARRIED over all ranks."""
    if communicator.inner < 0:
        return [_sum(carried, allreduce, communicator.ring)]
    old = allreduce.startswith("c_")
    summed = _sum(carried, allreduce, communicator.ring)
    wires = {"inputs": summed["inputs"], "outputs": summed["outputs"]}
    reduce_attrs: dict[str, Any] = {"ring_id": communicator.inner, "root_id": 0}
    root: dict[str, Any] = {"ring_id": communicator.inner, "root": 0}
    if old:
        # On their own stream nothing orders them after the gradients, or each other: Paddle 2's
        # StreamAnalyzer knows `c_allreduce_sum` only.
        for attrs in (reduce_attrs, summed["attrs"], root):
            attrs["use_calc_stream"] = True
    else:
        reduce_attrs["reduce_type"] = summed["attrs"]["reduce_type"]
    return [
        {"type": "c_reduce_sum" if old else "reduce", **wires, "attrs": reduce_attrs},
        *([summed] if communicator.is_leader else []),
        {"type": "c_broadcast" if old else "broadcast", **wires, "attrs": root},
    ]


def _sum(carried: Any, allreduce: str, ring: int) -> dict[str, Any]:
    attrs: dict[str, Any] = {"ring_id": ring}
    if allreduce.startswith("c_"):
        entry, exit_ = "X", "Out"
        in_stream = not settings.overlaps() or settings.effective("calc_comm_same_stream")
        attrs["use_calc_stream"] = bool(in_stream)
    else:
        import paddle

        entry, exit_ = "x", "out"
        attrs["reduce_type"] = paddle.distributed.ReduceOp.SUM
    return {
        "type": allreduce,
        "inputs": {entry: carried},
        "outputs": {exit_: carried},
        "attrs": attrs,
    }


def _open(startup: Any, fleet: Any, ring: int, ranks: Sequence[int]) -> None:
    common: Any = sys.modules["paddle.distributed.fleet.meta_optimizers.common"]
    endpoints = fleet.worker_endpoints()
    rank = fleet.worker_index()
    common.CollectiveHelper(fleet._role_maker, wait_port=False)._init_communicator(
        startup,
        endpoints[rank],
        [endpoints[member] for member in ranks],
        list(ranks).index(rank),
        ring,
        False,
        ring,
        True,
    )
