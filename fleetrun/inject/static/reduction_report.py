"""Reports how the running program reduces gradients, as counted in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import settings
from ..buckets import COUNTS, MEBIBYTE, describe_auto, fuses
from ..evidence import plural
from . import program, settings_view
from .cpu import channels, gloo
from .rings import has_communicator_for_each_ring

if TYPE_CHECKING:
    from ..evidence import Evidence

# Whether an allreduce is in the computation's stream; operators of Paddle 3 do not tell.
_STREAM = "use_calc_stream"
_GLOO_WAITS = "Paddle's operators wait for gloo at each allreduce"
_PARTS = ("c_reduce_sum", "reduce", "c_broadcast", "broadcast")


class CountedBucket(NamedTuple):
    """The gradients and bytes of one allreduce, and the rings that it is spread over."""

    gradients: int
    size: int
    rings: tuple[int, ...]


def buckets(running: Any) -> list[CountedBucket]:
    """Return the allreduces of gradients, each variable once, in the order of the program."""
    inside: dict[str, list[int]] = {}
    rings: dict[str, list[int]] = {}
    for block in running.blocks:
        for op in block.ops:
            channel = channels.channel_of(op)
            if channel is not None:
                names = channels.gradients_of(op)
                inside[names[0]] = [program.bytes_of(block, name) or 0 for name in names]
                rings[names[0]] = list(channel.rings)
            elif op.type == "coalesce_tensor":
                sizes = [program.bytes_of(block, name) or 0 for name in op.input("Input")]
                inside[op.output("FusedOutput")[0]] = sizes
            elif op.type in (*program.ALLREDUCES, *_PARTS) and program.role(op) & 1:
                name = op.input_arg_names[0]
                if name not in inside:
                    inside[name] = [program.bytes_of(block, name) or 0]
                rings.setdefault(name, []).append(op.attr("ring_id"))
    return [
        CountedBucket(len(inside[name]), sum(inside[name]), tuple(dict.fromkeys(over)))
        for name, over in rings.items()
    ]


def report(running: Any, before: int, ranks: int, proof: Evidence) -> None:
    """Report the counts of RUNNING, field by field; BEFORE: its allreduces if not rewritten."""
    counted = buckets(running)
    if ranks < 2 or not counted:  # a lone rank
        return
    sizes = [bucket.size for bucket in counted]
    gradients = sum(bucket.gradients for bucket in counted)
    proof.counts.update(
        gradients=gradients,
        allreduces_before=before,
        allreduces=len(counted),
        bucket_bytes=sizes,
        communicators=len({bucket.rings for bucket in counted}),
        rings=sorted({ring for bucket in counted for ring in bucket.rings}),
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
    off = "fuse_all_reduce_ops is off"
    name = "fuse_grad_size_in_MB"
    in_effect, text = settings.effective(name), packed
    limit = settings_view.bucket_limits(sum(sizes)).most_bytes
    if in_effect == "auto" and limit is not None:
        in_effect, words = describe_auto(sum(sizes))
        text += f"; {words}"
    fits = limit is not None and all(
        bucket.size <= limit or bucket.gradients == 1 for bucket in counted
    )
    settings.report(
        name, holds=fits, is_moot=is_moot, evidence=text, reason=off, in_effect=in_effect
    )
    for name in COUNTS:
        fits = fuses() and most <= settings.effective(name, default=0)
        text = f"{packed}; at most {most} gradients in one"
        settings.report(name, holds=fits, is_moot=is_moot, evidence=text, reason=off)
    _report_rings(proof, ranks)
    _report_waiting(running)


def _report_rings(proof: Evidence, ranks: int) -> None:
    allreduces, turns = (proof.counts[name] for name in ("allreduces", "communicators"))
    settings.report(
        "nccl_comm_num",
        holds=turns == settings_view.rings(),
        is_moot=turns == 1,
        evidence=(
            f"{plural(allreduces, 'allreduce')}{' in turn' if turns > 1 else ''} over"
            f" {plural(turns, 'communicator')} (rings {proof.counts['rings']})"
        ),
        reason=(
            "there are fewer allreduces than communicators"
            if gloo.is_used() or has_communicator_for_each_ring()
            else "on GPUs, Paddle 3 runs all rings over the first communicator"
        ),
        in_effect=turns,
    )
    if settings.effective("use_hierarchical_allreduce"):
        groups = proof.counts.get("groups")
        for name in ("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks"):
            settings.report(
                name,
                holds=bool(groups),
                evidence=f"sums in groups {groups}, among their first ranks, and back",
                reason=settings.one_level(settings_view.asked_group_size(), ranks),
            )


def _report_waiting(running: Any) -> None:
    """Record whether each allreduce is waited for before the computation goes on."""
    waiting, same_stream = "sync_nccl_allreduce", "calc_comm_same_stream"
    if not gloo.is_used():
        for name in (waiting, same_stream):
            _report_stream(running, name)
        return
    no_streams = "gloo on CPUs has no streams to wait for"
    settings.report(same_stream, holds=False, evidence="", reason=no_streams)
    waits = not settings.overlaps()
    beside = [operators for block in running.blocks for operators in channels.work_beside(block)]
    if not beside:
        reason = f"{_GLOO_WAITS}; nccl_comm_num above 1 lets the computation go on"
        settings.report(waiting, holds=waits, is_moot=True, evidence=_GLOO_WAITS, reason=reason)
        return
    early = sum(operators > 0 for operators in beside)
    evidence = (
        "each allreduce is waited for at once"
        if waits
        else f"{plural(sum(beside), 'operator')} of the computation run while {early} of"
        f" {plural(len(beside), 'allreduce')} are under way"
    )
    reason = "there is nothing left to compute while an allreduce is under way"
    settings.report(waiting, holds=(early == 0) == waits, evidence=evidence, reason=reason)


def _report_stream(running: Any, name: str) -> None:
    """Report whether the allreduces are in the computation's stream, as the field NAME requests."""
    inside = [
        bool(op.attr(_STREAM))
        for op in program.operators(running)
        if op.type in program.ALLREDUCES and op.has_attr(_STREAM)
    ]
    value = bool(settings.effective(name, default=False))
    counted = f"{sum(inside)} of {plural(len(inside), 'allreduce')} are in the computation's stream"
    settings.report(
        name,
        holds=bool(inside) and all(is_inside is value for is_inside in inside),
        evidence=counted,
        reason=counted if inside else "Paddle does not report the stream of this allreduce",
    )
