"""Reports how the running program reduces gradients, as counted in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .. import settings
from ..buckets import COUNTS, MEBIBYTE, describe_auto, fuses
from ..evidence import EFFECTIVE, NO_DIFFERENCE, NO_EFFECT, plural
from . import program, settings_view
from .cpu import channels, gloo
from .rings import has_communicator_for_each_ring

if TYPE_CHECKING:
    from ..evidence import Evidence

# Whether an allreduce is in the computation's stream; operators of Paddle 3 do not tell.
_STREAM = "use_calc_stream"
_GLOO_WAITS = "Paddle's operators wait for gloo at each allreduce"
_SEVERAL = "nccl_comm_num above 1 lets the computation go on"
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
    """Report the counts of RUNNING, field by field."""
    counted = buckets(running)
    if ranks < 2 or not counted:  # a lone rank
        return
    sizes = [bucket.size for bucket in counted]
    gradients = sum(bucket.gradients for bucket in counted)
    rings = sorted({ring for bucket in counted for ring in bucket.rings})
    turns = len({bucket.rings for bucket in counted})
    proof.counts.update(
        gradients=gradients,
        allreduces_before=before,
        allreduces=len(counted),
        bucket_bytes=sizes,
        communicators=turns,
        rings=rings,
    )
    largest = max(sizes)
    packed = (
        f"{plural(gradients, 'gradient')} in {plural(len(counted), 'allreduce')};"
        f" largest {largest / MEBIBYTE:.3g} MB"
    )
    limit = settings_view.bucket_limits(sum(sizes))
    most = max(bucket.gradients for bucket in counted)
    fused = len(counted) < gradients
    alone = most == 1
    # Paddle sends each gradient by itself.
    is_moot = alone and len(counted) == before
    _report(
        proof,
        "fuse_all_reduce_ops",
        holds=fused if fuses() else alone,
        is_moot=is_moot,
        evidence=packed,
        reason="no two gradients fit into one allreduce",
    )
    off = "fuse_all_reduce_ops is off"
    if settings.effective("fuse_grad_size_in_MB") is not None:
        fits = limit.most_bytes is not None and all(
            bucket.size <= limit.most_bytes or bucket.gradients == 1 for bucket in counted
        )
        in_effect = settings.effective("fuse_grad_size_in_MB")
        text = packed
        if in_effect == "auto" and limit.most_bytes is not None:
            in_effect, words = describe_auto(sum(sizes))
            text += f"; {words}"
        _report(
            proof,
            "fuse_grad_size_in_MB",
            holds=fits,
            is_moot=is_moot,
            evidence=text,
            reason=off,
            in_effect=in_effect,
        )
    for name in COUNTS:
        value = settings.effective(name)
        if value is not None:
            _report(
                proof,
                name,
                holds=fuses() and most <= value,
                is_moot=is_moot,
                evidence=f"{packed}; at most {most} gradients in one",
                reason=off,
            )
    _report_rings(proof, counted, turns, rings, ranks)
    _report_waiting(running, proof)


def _report_rings(
    proof: Evidence, counted: list[CountedBucket], turns: int, rings: list[int], ranks: int
) -> None:
    requested = settings_view.rings()
    _report(
        proof,
        "nccl_comm_num",
        holds=turns == requested,
        is_moot=turns == 1,
        evidence=(
            f"{plural(len(counted), 'allreduce')}{' in turn' if turns > 1 else ''} over"
            f" {plural(turns, 'communicator')} (rings {rings})"
        ),
        reason=(
            "there are fewer allreduces than communicators"
            if gloo.is_used() or has_communicator_for_each_ring()
            else "on GPUs, Paddle 3 runs all rings over the first communicator"
        ),
        in_effect=turns,
    )
    groups = proof.counts.get("groups")
    levels = bool(groups)
    requested_levels = settings.effective("use_hierarchical_allreduce")
    if requested_levels == "auto":
        proof.knob(
            "use_hierarchical_allreduce",
            NO_DIFFERENCE,
            in_effect=False,
            evidence="every allreduce is among all ranks",
            reason="auto: off in static graphs: only dynamic ones measure what two levels gain",
        )
    elif requested_levels:
        for name in ("use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks"):
            _report(
                proof,
                name,
                holds=levels,
                evidence=f"sums in groups {groups}, among their first ranks, and back",
                reason=settings.one_level(settings_view.asked_group_size(), ranks),
            )


def _report_waiting(running: Any, proof: Evidence) -> None:
    """Record whether each allreduce is waited for before the computation goes on."""
    waits = not settings.overlaps()
    if not gloo.is_used():
        for name in ("sync_nccl_allreduce", "calc_comm_same_stream"):
            _report_stream(running, name, proof)
        return
    _report(
        proof,
        "calc_comm_same_stream",
        holds=False,
        evidence="",
        reason="gloo on CPUs has no streams to wait for",
    )
    name = "sync_nccl_allreduce"
    beside = [operators for block in running.blocks for operators in channels.work_beside(block)]
    if not beside:
        reason = f"{_GLOO_WAITS}; {_SEVERAL}"
        _report(proof, name, holds=waits, is_moot=True, evidence=_GLOO_WAITS, reason=reason)
        return
    early = sum(operators > 0 for operators in beside)
    evidence = (
        "each allreduce is waited for at once"
        if waits
        else f"{plural(sum(beside), 'operator')} of the computation run while {early} of"
        f" {plural(len(beside), 'allreduce')} are under way"
    )
    reason = "there is nothing left to compute while an allreduce is under way"
    _report(proof, name, holds=(early == 0) == waits, evidence=evidence, reason=reason)


def _report_stream(running: Any, name: str, proof: Evidence) -> None:
    """Report whether the allreduces are in the computation's stream, as the field NAME requests."""
    inside = [
        bool(op.attr(_STREAM))
        for op in program.operators(running)
        if op.type in program.ALLREDUCES and op.has_attr(_STREAM)
    ]
    value = bool(settings.effective(name, default=False))
    counted = f"{sum(inside)} of {plural(len(inside), 'allreduce')} are in the computation's stream"
    _report(
        proof,
        name,
        holds=bool(inside) and all(is_inside is value for is_inside in inside),
        evidence=counted,
        reason=counted if inside else "Paddle does not report the stream of this allreduce",
    )


def _report(
    proof: Evidence,
    name: str,
    *,
    holds: bool,
    evidence: str,
    reason: str,
    in_effect: Any = None,
    is_moot: bool = False,
) -> None:
    """Report the field NAME if it was requested; IS_MOOT: the job would be the same without it."""
    value = settings.effective(name)
    if value is None or (
        value is False and proof.known(name, value).get("status") == NO_DIFFERENCE
    ):
        return
    if holds:
        shown = value if in_effect is None else in_effect
        status = NO_DIFFERENCE if is_moot else EFFECTIVE
        proof.knob(name, status, in_effect=shown, evidence=evidence)
    else:
        proof.knob(name, NO_EFFECT, reason=reason)
