"""Opens the communicators that buckets use in turn."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from .. import settings
from .cpu import channels, gloo


class BucketRing(NamedTuple):
    """The ring that sums a bucket; on CPUs with several, the channel that does so."""

    ring: int
    channel: channels.Channel | None = None


def number() -> int:
    """Return the number of communicators that the allreduces use in turn."""
    return max(1, int(settings.effective("nccl_comm_num", default=1)))


def open_rings(startup: Any, fleet: Any) -> list[BucketRing]:
    """Open the communicators that the strategy requests; all ranks must call this."""
    if gloo.is_used() and number() > 1:
        opened = channels.open_channels(fleet.worker_index(), fleet.worker_num(), number())
        return [BucketRing(channel.ring, channel) for channel in opened]
    first = channels.FIRST
    several = range(first + 1, first + number()) if has_communicator_for_each_ring() else ()
    for ring in several:
        _open(startup, fleet, ring)
    return [BucketRing(0), *map(BucketRing, several)]


def _open(startup: Any, fleet: Any, ring: int) -> None:
    """Let STARTUP make the communicator RING of all ranks."""
    common: Any = sys.modules["paddle.distributed.fleet.meta_optimizers.common"]
    endpoints, rank = fleet.worker_endpoints(), fleet.worker_index()
    helper = common.CollectiveHelper(fleet._role_maker, wait_port=False)
    helper._init_communicator(startup, endpoints[rank], endpoints, rank, ring, False, ring, True)


def has_communicator_for_each_ring() -> bool:
    """Whether rings on GPUs have their own communicators.

    See SetDeviceCommContext of Paddle 3's executor: `if (!dev_ctx->GetCommContext())`.
    """
    return str(sys.modules["paddle"].__version__).startswith("2.")


def allreduce(carried: Any, kind: str, ring: int) -> dict[str, Any]:
    """Return the operator of KIND that sums CARRIED over all ranks."""
    attrs: dict[str, Any] = {"ring_id": ring}
    if kind.startswith("c_"):
        entry, exit_ = "X", "Out"
        in_stream = not settings.overlaps() or settings.effective("calc_comm_same_stream")
        attrs["use_calc_stream"] = bool(in_stream)
    else:
        import paddle

        entry, exit_ = "x", "out"
        attrs["reduce_type"] = paddle.distributed.ReduceOp.SUM
    return {"type": kind, "inputs": {entry: carried}, "outputs": {exit_: carried}, "attrs": attrs}
