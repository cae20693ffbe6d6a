"""Reports how the running program reduces gradients, as counted in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import settings
from ..buckets import COUNTS, MEBIBYTE, auto_limit_mb, fuses
from ..evidence import plural
from . import fuse_allreduce, program, rings
from .cpu import channels, gloo

if TYPE_CHECKING:
    from ..evidence import Evidence


class CountedBucket(NamedTuple):
    """The gradients and bytes of one allreduce, and its ring."""

    gradients: int
    size: int
    ring: int


def buckets(running: Any) -> list[CountedBucket]:
    """Return the allreduces of gradients, in the order of the program."""
    inside: dict[str, list[str]] = {}
    counted = []
    for block in running.blocks:
        for op in block.ops:
            channel = channels.channel_of(op)
            if op.type == "coalesce_tensor":
                inside[op.output("FusedOutput")[0]] = op.input("Input")
            if channel is not None:
                names, ring = channels.gradients_of(op), channel.ring
            elif op.type in program.ALLREDUCES and program.role(op) & program.BACKWARD:
                name = op.input_arg_names[0]
                names, ring = inside.get(name, [name]), op.attr("ring_id")
            else:
                continue
            size = sum(program.bytes_of(block, name) or 0 for name in names)
            counted.append(CountedBucket(len(names), size, ring))
    return counted


def report(running: Any, before: int, ranks: int, proof: Evidence) -> None:
    """Report the counts of RUNNING, field by field; BEFORE: its allreduces if not rewritten."""
    counted = buckets(running)
    if ranks < 2 or not counted:  # a lone rank
        return
    sizes = [bucket.size for bucket in counted]
    gradients = sum(bucket.gradients for bucket in counted)
    used = sorted({bucket.ring for bucket in counted})
    proof.counts.update(
        gradients=gradients,
        allreduces_before=before,
        allreduces=len(counted),
        bucket_bytes=sizes,
        communicators=len(used),
        rings=used,
    )
    packed = (
        f"{plural(gradients, 'gradient')} in {plural(len(counted), 'allreduce')};"
        f" largest {max(sizes) / MEBIBYTE:.3g} MB"
    )
    most = max(bucket.gradients for bucket in counted)
    # Paddle sends each gradient by itself.
    is_moot = most == 1 and len(counted) == before
    settings.report(
        "fuse_all_reduce_ops",
        holds=len(counted) < gradients if fuses() else most == 1,
        is_moot=is_moot,
        evidence=packed,
        reason="no two gradients fit into one allreduce",
    )
    name, off = "fuse_grad_size_in_MB", "fuse_all_reduce_ops is off"
    in_effect = settings.effective(name)
    if in_effect == "auto":
        in_effect = auto_limit_mb(sum(sizes))
    limit = fuse_allreduce.bucket_limits(sum(sizes)).most_bytes
    fits = limit is not None and all(
        bucket.size <= limit or bucket.gradients == 1 for bucket in counted
    )
    settings.report(
        name, holds=fits, is_moot=is_moot, evidence=packed, reason=off, in_effect=in_effect
    )
    for name in COUNTS:
        fits = fuses() and most <= settings.effective(name, default=0)
        settings.report(name, holds=fits, is_moot=is_moot, evidence=packed, reason=off)
    # Even one of these differs from Paddle's, in speed and in what it waits for.
    is_ours = used[0] >= channels.FIRST
    settings.report(
        "nccl_comm_num",
        holds=len(used) > 1 or is_ours or rings.number() == 1,
        is_moot=len(used) == 1 and not is_ours,
        evidence=f"{plural(len(counted), 'allreduce')} over {plural(len(used), 'communicator')}"
        + ", not Paddle's own" * is_ours,
        reason=(
            "there are fewer allreduces than communicators"
            if rings.has_communicator_for_each_ring()
            else "on GPUs, Paddle 3 runs all rings over the first communicator"
        ),
        in_effect=len(used),
    )
    _report_waiting(running)


def _report_waiting(running: Any) -> None:
    """Report whether the computation waits for each allreduce, or goes on in its own stream."""
    name, same_stream = "sync_nccl_allreduce", "calc_comm_same_stream"
    waits = not settings.overlaps()
    if gloo.is_used():
        reason = "gloo on CPUs has no streams to wait for"
        settings.report(same_stream, holds=False, evidence="", reason=reason)
        beside = [number for block in running.blocks for number in channels.work_beside(block)]
        early = sum(number > 0 for number in beside)
        evidence = f"{plural(sum(beside), 'operator')} of the computation run during {early} sums"
        if not beside:
            evidence = "Paddle's operators wait for gloo; nccl_comm_num above 1 does not wait"
        is_moot, holds = waits and not beside, (early == 0) == waits
        settings.report(name, holds=holds, is_moot=is_moot, evidence=evidence, reason=evidence)
        return
    # Operators of Paddle 3 do not tell.
    inside = [
        bool(op.attr("use_calc_stream"))
        for op in program.operators(running)
        if op.type in program.ALLREDUCES and op.has_attr("use_calc_stream")
    ]
    counted = f"{sum(inside)} of {plural(len(inside), 'allreduce')} are in the computation's stream"
    for field in (name, same_stream):
        value = bool(settings.effective(field, default=False))
        settings.report(
            field,
            holds=bool(inside) and all(is_inside is value for is_inside in inside),
            evidence=counted,
            reason=counted if inside else "Paddle does not report the stream of this allreduce",
        )
