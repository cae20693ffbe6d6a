"""Reads static programs: which operators reduce gradients, which update parameters."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from .cpu import channels

if TYPE_CHECKING:
    from collections.abc import Iterator

# Paddle 2's operator, and Paddle 3's.
ALLREDUCES = ("c_allreduce_sum", "all_reduce")
BACKWARD, OPTIMIZE = 1, 2
# Paddle 2's executor keeps its collectives in order by itself, Paddle 3's only the old operators.
_UNORDERED = {"all_reduce", "reduce", "broadcast"}
_SIZES = {"16": 2, "32": 4, "64": 8}


class Reduction(NamedTuple):
    """An operator that sums a gradient over the ranks."""

    block: Any
    place: int
    op: Any
    variable: str


def operators(program: Any) -> Iterator[Any]:
    """Yield the operators of all blocks."""
    for block in program.blocks:
        yield from block.ops


def reductions(program: Any) -> list[Reduction]:
    """Find the allreduces of gradients in all blocks, in the order of the program."""
    return [
        Reduction(block, index, op, op.input_arg_names[0])
        for block in program.blocks
        for index, op in enumerate(block.ops)
        if op.type in ALLREDUCES and role(op) & BACKWARD
    ]


def role(op: Any) -> int:
    """Return the role bits of the operator OP."""
    return int(op.attr("op_role")) if op.has_attr("op_role") else 0


def updates(program: Any) -> list[Any]:
    """Find the operators that update parameters by their gradients."""
    return [
        op
        for op in operators(program)
        if role(op) & OPTIMIZE and {"Param", "Grad"} <= set(op.input_names) and op.input("Param")
    ]


def has_updates(program: Any) -> bool:
    """Whether PROGRAM, in the new representation (PIR) or the old one, updates parameters."""
    ops = program.global_block().ops
    if ops and hasattr(ops[0], "get_input_names"):
        return any(
            # Other operators may lack input names and raise; in-place ones end with `_`.
            op.name().endswith("_") and {"param", "grad"} <= set(op.get_input_names())
            for op in ops
        )
    return bool(updates(program))


def written_by_forward(program: Any) -> set[str]:
    """Return the names of variables that forward operators compute, not those that they send."""
    return {
        name
        for op in operators(program)
        if op.has_attr("op_role")
        and not role(op) & (BACKWARD | OPTIMIZE)
        and not op.has_attr("ring_id")
        for name in op.output_arg_names
    }


def merged_updates(op: Any) -> list[Any]:
    """Return the operators of the block that OP runs on some steps, if it updates parameters."""
    if op.type != "conditional_block":
        return []
    ops: list[Any] = op.block.program.blocks[op._block_attr_id("sub_block")].ops
    return ops if any({"Param", "Grad"} <= set(inner.input_names) for inner in ops) else []


def _communicates(op: Any) -> bool:
    # Over several communicators of CPUs, Python sends.
    return op.has_attr("ring_id") or channels.channel_of(op) is not None


def bytes_of(block: Any, name: str) -> int | None:
    """Return the size of the dense variable NAME in bytes; None if it is sparse or unknown yet."""
    variable = block._find_var_recursive(name)
    try:
        shape, kind = variable.shape, str(variable.type)
    except (AttributeError, ValueError):
        return None
    if ("LOD_TENSOR" not in kind and "DENSE_TENSOR" not in kind) or min(shape, default=0) < 0:
        return None
    return int(math.prod(shape)) * _SIZES.get(str(variable.dtype)[-2:], 4)


def count(program: Any) -> Counter[str]:
    """Count the operators of each type, in all blocks."""
    return Counter(op.type for op in operators(program))


def remove(program: Any, types: tuple[str, ...]) -> None:
    """Remove all operators of TYPES from PROGRAM."""
    for block in program.blocks:
        for index in reversed(range(len(block.ops))):
            if block.ops[index].type in types:
                block._remove_op(index, sync=False)
    program._sync_with_cpp()


def keep_order(program: Any) -> None:
    """Make each collective of PROGRAM depend on the previous one in its block, as on all ranks."""
    for block in program.blocks:
        # No executor orders what is in another block, as merged updates are.
        others = [any(map(_communicates, merged_updates(op))) for op in block.ops]
        kinds = {*_UNORDERED, *(ALLREDUCES if any(others) else ())}
        places = [i for i, op in enumerate(block.ops) if others[i] or op.type in kinds]
        # Backwards, so that earlier indexes stay valid.
        for before, place in reversed(list(zip(places, places[1:]))):  # noqa: RUF007 - 3.8
            op, previous = block.ops[place], block.ops[before]
            read = op.input("Cond") if op.type == "conditional_block" else op.input_arg_names
            is_block = previous.type == "conditional_block"
            written = previous.output_arg_names if is_block else previous.input_arg_names
            carried, awaited = (block._find_var_recursive(names[0]) for names in (read, written))
            block._insert_op_without_sync(
                place,
                type="depend",
                inputs={"X": carried, "Dep": awaited},
                outputs={"Out": carried},
                attrs={"op_role": role(op)},
            )
    program._sync_with_cpp()
