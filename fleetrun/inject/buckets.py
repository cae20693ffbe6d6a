"""Packs gradients into buckets: greedily, by bytes and by count, in the order of backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from . import settings

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

MEBIBYTE = 1024 * 1024
# The fields that limit the number of gradients, and all fields that shape buckets.
COUNTS = ("fuse_grad_size_in_num", "fuse_grad_size_in_TFLOPS")
FUSION = ("fuse_all_reduce_ops", "fuse_grad_size_in_MB", *COUNTS, "last_comm_group_size_MB")
_LEAST_AUTO_BYTES = float(MEBIBYTE)


class BucketLimits(NamedTuple):
    """The limits of a bucket; None means no limit."""

    most_bytes: float | None = None
    most_gradients: int | None = None
    # Of the bucket that is sent last.
    last_bytes: float | None = None


def fuses() -> bool:
    """Whether gradients share allreduces, which is Paddle's default."""
    return bool(settings.effective("fuse_all_reduce_ops", default=True))


def limits(gradient_bytes: int, default: BucketLimits) -> BucketLimits:
    """Return the limits in effect for GRADIENT_BYTES; DEFAULT's where the strategy has none."""
    if not fuses():
        return BucketLimits(most_gradients=1)
    size = settings.effective("fuse_grad_size_in_MB")
    counts = [int(settings.effective(name)) for name in COUNTS if settings.effective(name)]
    most_bytes, most_gradients, last_bytes = default
    if counts or size is not None:
        most_gradients = min(counts, default=None)
    if size is not None:
        is_auto = size == "auto"
        most_bytes = auto_limit_bytes(gradient_bytes) if is_auto else float(size) * MEBIBYTE
    last = settings.effective("last_comm_group_size_MB")
    return BucketLimits(
        most_bytes, most_gradients, last_bytes if last is None else float(last) * MEBIBYTE
    )


def pack(sizes: Sequence[int], kinds: Sequence[Hashable], limits: BucketLimits) -> list[list[int]]:
    """Return the indexes of each bucket. A bucket has gradients of one kind (dtype) only.

    SIZES are bytes, in the order of backward. A bucket is closed when the next gradient of its
    kind would exceed LIMITS; a larger gradient is a bucket by itself. Buckets are in the order in
    which they are complete.

    With `last_bytes`, the last gradients that fit into it are the last bucket, at least one of
    them. No computation can hide its allreduce, so a small one ends the step sooner.

    >>> pack([4, 4, 4, 9, 1], "aaaaa", BucketLimits(most_bytes=8))
    [[0, 1], [2], [3], [4]]
    >>> pack([4, 4, 4, 4], "abab", BucketLimits(most_gradients=2))
    [[0, 2], [1, 3]]
    >>> pack([4, 4, 4, 4], "aaaa", BucketLimits(last_bytes=5))
    [[0, 1, 2], [3]]
    >>> pack([4, 4, 4, 9], "aaaa", BucketLimits(last_bytes=5))
    [[0, 1, 2], [3]]
    """
    if limits.last_bytes is not None:
        start = _tail(sizes, kinds, limits.last_bytes)
        if 0 < start < len(sizes):
            head, tail = (
                pack(sizes[part], kinds[part], BucketLimits(*limits[:2]))
                for part in (slice(None, start), slice(start, None))
            )
            return [*head, *([start + index for index in bucket] for bucket in tail)]
    done: list[list[int]] = []
    still_open: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for index, (size, kind) in enumerate(zip(sizes, kinds)):
        bucket = still_open.get(kind)
        if bucket is not None and (
            (limits.most_bytes is not None and filled[kind] + size > limits.most_bytes)
            or (limits.most_gradients is not None and len(bucket) >= limits.most_gradients)
        ):
            done.append(bucket)
            bucket = None
        if bucket is None:
            bucket = still_open[kind] = []
            filled[kind] = 0
        bucket.append(index)
        filled[kind] += size
    return sorted([*done, *still_open.values()], key=lambda bucket: bucket[-1])


def _tail(sizes: Sequence[int], kinds: Sequence[Hashable], limit: float) -> int:
    """Return the index from which the last gradients of one kind fit into LIMIT, at least one."""
    start, filled = len(sizes), 0
    while start and kinds[start - 1] == kinds[-1] and filled + sizes[start - 1] <= limit:
        start -= 1
        filled += sizes[start]
    return min(start, len(sizes) - 1)


def auto_limit_bytes(gradient_bytes: int) -> float:
    """Return the limit of `fuse_grad_size_in_MB: auto`, in bytes.

    It is a tenth of all gradients, as Paddle's documentation advises, which makes about ten
    buckets; but at least 1 MiB, Paddle's own limit for the last bucket: the startup of a smaller
    one costs more than overlap hides.
    """
    return max(gradient_bytes / 10, _LEAST_AUTO_BYTES)


def auto_limit_mb(gradient_bytes: int) -> float:
    """Return the limit of `auto` in MB, as the table shows it.

    >>> auto_limit_mb(20 * MEBIBYTE), auto_limit_mb(2 * MEBIBYTE)
    (2.0, 1.0)
    """
    return float(f"{auto_limit_bytes(gradient_bytes) / MEBIBYTE:.3g}")
