"""Changes static programs by Paddle's private functions; call `sync` after the last change."""

from __future__ import annotations

from typing import Any


def variable(block: Any, name: str) -> Any:
    """Return the variable NAME of BLOCK or of a block around it."""
    return block._find_var_recursive(name)


def insert(block: Any, place: int, **operator: Any) -> None:
    """Insert an OPERATOR (type, inputs, outputs, attrs) into BLOCK at PLACE."""
    block._insert_op_without_sync(place, **operator)


def remove(block: Any, place: int) -> None:
    """Remove the operator of BLOCK at PLACE."""
    block._remove_op(place, sync=False)


def rename(block: Any, name: str, new_name: str) -> None:
    """Rename the variable NAME of BLOCK."""
    block._rename_var(name, new_name)


def sync(program: Any) -> None:
    """Bring the Python side of PROGRAM up to date."""
    program._sync_with_cpp()


def inner_block(op: Any) -> Any:
    """Return the block that the operator OP runs on a condition."""
    return op.block.program.blocks[op._block_attr_id("sub_block")]
