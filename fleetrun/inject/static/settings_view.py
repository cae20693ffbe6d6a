"""The settings of static programs: the strategy's, or the script's where those win."""

from __future__ import annotations

from .. import settings
from ..buckets import FUSION, BucketLimits, limits

_COMMUNICATION = (
    # Static graphs have no last bucket of its own size.
    *FUSION[:-1],
    "nccl_comm_num",
    "sync_nccl_allreduce",
    "gradient_merge",
    # With it Paddle omits the operators that order the collectives; gloo has no streams.
    "calc_comm_same_stream",
)
# Paddle's own limit if the strategy has none.
_PADDLES_LIMITS = BucketLimits(most_gradients=8)


def rewrites() -> bool:
    """Whether the strategy affects how gradients are reduced."""
    if settings.effective("localsgd"):
        # LocalSGD looks for one allreduce per gradient.
        return True
    return any(settings.effective(name) is not None for name in _COMMUNICATION)


def bucket_limits(gradient_bytes: int) -> BucketLimits:
    """Return the limits of the allreduces for GRADIENT_BYTES."""
    return BucketLimits(*limits(gradient_bytes, _PADDLES_LIMITS)[:2])
