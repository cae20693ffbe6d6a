"""The settings of static programs: the strategy's, or the script's where those win."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .. import settings
from ..buckets import MEBIBYTE, PLAN, auto_limit_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

COUNTS = ("fuse_grad_size_in_num", "fuse_grad_size_in_TFLOPS")
COMMUNICATION = (
    "fuse_all_reduce_ops",
    "fuse_grad_size_in_MB",
    *COUNTS,
    "nccl_comm_num",
    "use_hierarchical_allreduce",
    "sync_nccl_allreduce",
    "gradient_merge",
    # With it Paddle omits the operators that order the collectives; gloo has no streams.
    "calc_comm_same_stream",
)
# Paddle's own limit if the strategy has none.
PADDLES_COUNT = 8


class Limits(NamedTuple):
    """The limits of one allreduce; None means no limit."""

    size: float | None
    number: int | None


def rewrites() -> bool:
    """Whether the strategy affects how gradients are reduced."""
    if settings.effective("localsgd"):
        # LocalSGD looks for one allreduce per gradient.
        return True
    return any(settings.effective(name) is not None for name in COMMUNICATION)


def fuses() -> bool:
    """Whether gradients share allreduces, which is Paddle's default."""
    return bool(settings.effective("fuse_all_reduce_ops", default=True))


def limits(sizes: Sequence[int]) -> Limits:
    """Return the limits for gradients of SIZES, in bytes."""
    if not fuses():
        return Limits(None, 1)
    size = settings.effective("fuse_grad_size_in_MB")
    counts = [int(settings.effective(name)) for name in COUNTS if settings.effective(name)]
    if size is None and not counts:
        return Limits(None, PADDLES_COUNT)
    if size in ("auto", PLAN):
        size = auto_limit_bytes(sum(sizes))
    elif size is not None:
        size = float(size) * MEBIBYTE
    return Limits(size, min(counts) if counts else None)


def rings() -> int:
    """Return the number of communicators that the allreduces use in turn."""
    return max(1, int(settings.effective("nccl_comm_num", default=1)))


def waits() -> bool:
    """Whether each allreduce is waited for before the computation goes on."""
    return bool(settings.effective("sync_nccl_allreduce", default=False))


def group_size(ranks: int) -> int:
    """Return how many ranks reduce among themselves first; 1 with one level only.

    `auto` means one level, too: programs are written before anything can be measured, and not all
    GPUs can run two levels.
    """
    if settings.effective("use_hierarchical_allreduce") in (None, False, "auto"):
        return 1
    size = asked_group_size()
    return size if 1 < size < ranks else 1


def asked_group_size() -> int:
    """Return the requested size of groups."""
    topology = settings.effective_spec().topology
    return int(settings.effective("hierarchical_allreduce_inter_nranks") or topology.ranks_per_node)


def fuses_optimizers() -> bool:
    """Whether the updates of several parameters become one operator."""
    return bool(settings.effective("fuse_all_optimizer_ops"))
