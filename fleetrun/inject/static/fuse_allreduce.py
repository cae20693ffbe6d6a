"""Packs the allreduces of gradients: one for each bucket, right after its last gradient.

It runs during the backward, by Paddle's operators or by a channel of ours (CPU). Paddle's operators
take a buffer into which `coalesce_tensor` copies the gradients, so gradients that share memory with
other tensors, as reshaped ones do, stay right.
"""

from __future__ import annotations

from typing import Any

from .. import settings
from ..buckets import FUSION, BucketLimits, limits, pack
from . import program, rings
from .cpu import channels
from .program import Reduction

FUSED = "fleetrun_bucket"
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
    return any(settings.effective(name) is not None for name in _COMMUNICATION)


def bucket_limits(gradient_bytes: int) -> BucketLimits:
    """Return the limits of the allreduces for GRADIENT_BYTES."""
    return BucketLimits(*limits(gradient_bytes, _PADDLES_LIMITS)[:2])


def run(main: Any, startup: Any, fleet: Any) -> None:
    """Rewrite the allreduces of MAIN as the strategy requests."""
    reductions = program.reductions(main)
    if reductions:
        opened = rings.open_rings(startup, fleet)
        for block in main.blocks:
            own = [reduction for reduction in reductions if reduction.block is block]
            _pack_block(block, own, opened)
        main._sync_with_cpp()


def _pack_block(block: Any, reductions: list[Reduction], opened: list[rings.BucketRing]) -> None:
    """Pack the REDUCTIONS of BLOCK; its buckets use the rings OPENED in turn."""
    buckets = _buckets(block, reductions)
    by_end = {bucket[-1].place: number for number, bucket in enumerate(buckets)}
    tokens = [None, *(channels.make_token(block) for _ in buckets)] if opened[0].channel else []
    packed = [member for bucket in buckets for member in bucket]
    # Backwards, so that earlier indexes stay valid.
    for reduction in sorted(packed, key=lambda member: -member.place):
        place, op_role, kind = reduction.place, program.role(reduction.op), reduction.op.type
        block._remove_op(place, sync=False)
        if place not in by_end:
            continue
        number = by_end[place]
        ring = opened[number % len(opened)]
        names = [member.variable for member in buckets[number]]
        gradients = [block._find_var_recursive(name) for name in names]
        if ring.channel is None:
            _insert(block, place, gradients, ring.ring, kind, op_role)
            continue
        span = (place, _first_reader(block, place, names) if settings.overlaps() else place)
        passed = (tokens[number], tokens[number + 1])
        channels.insert(block, span, gradients, ring.channel, tokens=passed, op_role=op_role)


def _buckets(block: Any, reductions: list[Reduction]) -> list[list[Reduction]]:
    """Return the dense ones of REDUCTIONS in buckets, in the order of their last members."""
    sizes = {member.place: program.bytes_of(block, member.variable) for member in reductions}
    dense = [member for member in reductions if sizes[member.place] is not None]
    own = [sizes[member.place] or 0 for member in dense]
    kinds = [str(block._find_var_recursive(member.variable).dtype) for member in dense]
    buckets = []
    for places in pack(own, kinds, bucket_limits(sum(own))):
        buckets += _split_where_read(block, [dense[place] for place in places])
    return sorted(buckets, key=lambda bucket: bucket[-1].place)


def _touches(op: Any, names: list[str]) -> bool:
    return not {*op.input_arg_names, *op.output_arg_names}.isdisjoint(names)


def _first_reader(block: Any, start: int, names: list[str]) -> int:
    """Return the index of the first operator from START on that may touch one of NAMES."""
    for index, op in enumerate(block.ops[start:], start):
        # An operator with a block of its own may read anything.
        if op.has_attr("sub_block") or _touches(op, names):
            return index
    return len(block.ops)


def _split_where_read(block: Any, members: list[Reduction]) -> list[list[Reduction]]:
    """Remove members that are touched before the bucket is full, and reduce them alone."""
    alone: list[Reduction] = []
    together: list[Reduction] = []
    for member in members:
        between = block.ops[member.place + 1 : members[-1].place]
        touched = any(_touches(op, [member.variable]) for op in between)
        (alone if touched else together).append(member)
    return [*([member] for member in alone), *([together] if together else [])]


def _insert(  # noqa: PLR0917 - one place calls it
    block: Any, index: int, gradients: list[Any], ring: int, allreduce: str, op_role: int
) -> None:
    """Put one allreduce of GRADIENTS at INDEX."""
    from paddle.utils import unique_name

    carried = gradients[0]
    ops: list[dict[str, Any]] = []
    if len(gradients) > 1:
        carried = block.create_var(
            name=unique_name.generate(FUSED),
            dtype=gradients[0].dtype,
            persistable=False,
            stop_gradient=True,
        )
        ops.append(
            {
                "type": "coalesce_tensor",
                "inputs": {"Input": gradients},
                "outputs": {"Output": gradients, "FusedOutput": carried},
                "attrs": {"copy_data": True, "use_align": True, "dtype": carried.dtype},
            }
        )
    ops.append(rings.allreduce(carried, allreduce, ring))
    if len(gradients) > 1:
        # The executor orders by names, and no other operator tells it that the sum is in these.
        ops += [
            {
                "type": "depend",
                "inputs": {"X": gradient, "Dep": carried},
                "outputs": {"Out": gradient},
                "attrs": {},
            }
            for gradient in gradients
        ]
    for offset, op in enumerate(ops):
        op["attrs"]["op_role"] = op_role
        block._insert_op_without_sync(index + offset, **op)
