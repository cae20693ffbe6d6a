"""The settings that concern static programs: the strategy's, or the script's where those win."""

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
    # With it Paddle leaves out the operators that order the collectives; gloo has no streams.
    "calc_comm_same_stream",
)
# Paddle's own limit, where the strategy has no limit at all.
PADDLES_COUNT = 8


class Limits(NamedTuple):
    """The most that one allreduce may carry; None is no limit."""

    size: float | None
    number: int | None


def rewrites() -> bool:
    """Whether the strategy says anything about how gradients are reduced."""
    if settings.effective("localsgd"):
        # LocalSGD looks for one allreduce per gradient.
        return True
    return any(settings.effective(name) is not None for name in COMMUNICATION)


def fuses() -> bool:
    """Whether gradients share allreduces: Paddle's default."""
    return bool(settings.effective("fuse_all_reduce_ops", default=True))


def limits(sizes: Sequence[int]) -> Limits:
    """Return what holds for gradients of SIZES, in bytes."""
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
    """Return over how many communicators the allreduces go in turn."""
    return max(1, int(settings.effective("nccl_comm_num", default=1)))


def waits() -> bool:
    """Whether each allreduce is to be waited for before the computation goes on."""
    return bool(settings.effective("sync_nccl_allreduce", default=False))


def group_size(ranks: int) -> int:
    """Return how many ranks reduce among themselves first; 1 where there is one level only.

    That is so with `auto`, too: programs are written before anything can be measured, and of GPUs
    not all can run two levels.
    """
    if settings.effective("use_hierarchical_allreduce") in (None, False, "auto"):
        return 1
    size = asked_group_size()
    return size if 1 < size < ranks else 1


def asked_group_size() -> int:
    """Return the size of groups that is asked for, if groups are."""
    topology = settings.effective_spec().topology
    return int(settings.effective("hierarchical_allreduce_inter_nranks") or topology.ranks_per_node)


def fuses_optimizers() -> bool:
    """Whether the updates of several parameters are to be one operator."""
    return bool(settings.effective("fuse_all_optimizer_ops"))
