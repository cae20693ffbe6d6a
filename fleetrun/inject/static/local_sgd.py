"""Removes the gradient allreduces that Paddle 2.6 leaves in programs of LocalSGD."""

from __future__ import annotations

from typing import Any

from . import program

_LOSS_GRADIENT = 257


def run(main: Any, ranks: int) -> None:
    """Remove from MAIN the sums of gradients, and the division of the loss by the number of RANKS.

    The operators that average the parameters are in blocks that run on some steps only.
    """
    block = main.global_block()
    losses = {
        name
        for op in block.ops
        if program.role(op) == _LOSS_GRADIENT
        for name in op.output_arg_names
    }
    for index in reversed(range(len(block.ops))):
        op = block.ops[index]
        is_share = (
            op.type == "scale"
            and losses.intersection(op.input_arg_names)
            and abs(op.attr("scale") * ranks - 1) < 1e-6  # single precision
        )
        if is_share or (op.type in program.ALLREDUCES and program.role(op) & program.BACKWARD):
            block._remove_op(index, sync=False)
    main._sync_with_cpp()
