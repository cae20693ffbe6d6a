"""Packs the allreduces of gradients: one for each bucket, right after its last gradient.

It runs during the backward, by Paddle's operators or by a channel of ours (CPU). Paddle's operators
take a buffer into which `coalesce_tensor` copies the gradients, so gradients that share memory with
other tensors, as reshaped ones do, stay right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import settings
from ..buckets import pack
from . import program, rings, settings_view
from .cpu import channels, gloo

if TYPE_CHECKING:
    from ..evidence import Evidence

FUSED = "fleetrun_bucket"


def run(main: Any, startup: Any, fleet: Any, proof: Evidence) -> None:
    """Rewrite the allreduces of MAIN as the strategy requests."""
    reductions = program.reductions(main)
    if not reductions:
        return
    for reduction in reductions:
        kind = str(reduction.block._find_var_recursive(reduction.variable).type)
        if "SELECTED_ROWS" in kind and gloo.is_used():
            text = (
                f"Paddle's static graphs cannot sum the sparse gradient {reduction.variable} over "
                "ranks on CPUs: make its Embedding with sparse=False."
            )
            proof.note(text)
            raise RuntimeError(text)
    communicators = rings.open_rings(startup, fleet, proof)
    turn = 0
    for block in main.blocks:
        in_block = [reduction for reduction in reductions if reduction.block is block]
        turn = _pack_block(block, in_block, communicators, turn)
    main._sync_with_cpp()


def _pack_block(
    block: Any,
    reductions: list[program.Reduction],
    communicators: list[rings.BucketRings],
    turn: int,
) -> int:
    """Pack the REDUCTIONS of BLOCK; return TURN, the buckets so far, plus the new ones."""
    dense = []
    for reduction in reductions:
        size = program.bytes_of(block, reduction.variable)
        if size is not None:
            dense.append((reduction, size))
    sizes = [size for _, size in dense]
    kinds = [str(block._find_var_recursive(member.variable).dtype) for member, _ in dense]
    places = pack(sizes, kinds, settings_view.bucket_limits(sum(sizes)))
    buckets = []
    for place in places:
        members = [dense[i][0] for i in place]
        buckets += _split_where_read(block, members)
    buckets.sort(key=lambda bucket: bucket[-1].place)
    by_end = {bucket[-1].place: (bucket, turn + n) for n, bucket in enumerate(buckets)}
    tokens = (
        [None, *(channels.make_token(block) for _ in buckets)] if communicators[0].channel else []
    )
    for reduction in sorted((member for member, _ in dense), key=lambda member: -member.place):
        op_role = program.role(reduction.op)
        original = reduction.op.type
        block._remove_op(reduction.place, sync=False)
        if reduction.place in by_end:
            bucket, number = by_end[reduction.place]
            communicator = communicators[number % len(communicators)]
            names = [member.variable for member in bucket]
            if communicator.channel is None:
                _insert(block, reduction.place, names, communicator, original, op_role)
                continue
            reader = _first_reader(block, reduction.place, names)
            span = (reduction.place, reader if settings.overlaps() else reduction.place)
            gradients = [block._find_var_recursive(name) for name in names]
            passed = (tokens[number - turn], tokens[number - turn + 1])
            channels.insert(
                block, span, gradients, communicator.channel, tokens=passed, op_role=op_role
            )
    return turn + len(buckets)


def _first_reader(block: Any, start: int, names: list[str]) -> int:
    """Return the index of the first operator from START on that may touch one of NAMES."""
    for index, op in enumerate(block.ops[start:], start):
        # An operator with a block of its own may read anything.
        if op.has_attr("sub_block") or not {*op.input_arg_names, *op.output_arg_names}.isdisjoint(
            names
        ):
            return index
    return len(block.ops)


def _split_where_read(
    block: Any, members: list[program.Reduction]
) -> list[list[program.Reduction]]:
    """Remove members that are touched before the bucket is full, and reduce them alone."""
    last = members[-1].place
    indexes = {member.place for member in members}
    alone: list[program.Reduction] = []
    together: list[program.Reduction] = []
    for member in members:
        between = (
            op
            for index, op in enumerate(block.ops[member.place + 1 : last], member.place + 1)
            if index not in indexes
        )
        touched = any(
            member.variable in op.input_arg_names or member.variable in op.output_arg_names
            for op in between
        )
        (alone if touched else together).append(member)
    return [*([member] for member in alone), *([together] if together else [])]


def _insert(  # noqa: PLR0917 - one place calls it
    block: Any,
    index: int,
    names: list[str],
    communicator: rings.BucketRings,
    allreduce: str,
    op_role: int,
) -> None:
    """Put one allreduce of the gradients NAMES at INDEX."""
    from paddle.utils import unique_name

    gradients = [block._find_var_recursive(name) for name in names]
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
    ops += rings.reduce_over(communicator, carried, allreduce)
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
