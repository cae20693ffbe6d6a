"""Runs Paddle's fusion passes that this build has, and records which are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..evidence import device_kind
from . import program

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PASSES = {
    "fuse_elewise_add_act_ops": "fuse_elewise_add_act_pass",
    "fuse_bn_act_ops": "fuse_bn_act_pass",
    "fuse_bn_add_act_ops": "fuse_bn_add_act_pass",
    "fuse_relu_depthwise_conv": "fuse_relu_depthwise_conv_pass",
    "fuse_gemm_epilogue": "fuse_gemm_epilogue_pass",
    "enable_auto_fusion": "fusion_group_pass",
    "enable_inplace": "buffer_shared_inplace_pass",
    "enable_addto": "inplace_addto_op_pass",
    "sync_batch_norm": "sync_batch_norm_pass",
    "cache_runtime_context": "runtime_context_cache_pass",
}
# Their operators have kernels for GPUs only; builds have the passes on CPUs, too. There, depthwise
# convolutions ignore that they are to include the ReLU.
_ON_GPUS = ("fuse_gemm_epilogue", "enable_auto_fusion", "fuse_relu_depthwise_conv")
NOTHING = "Paddle's pass found nothing to fuse in this program"
_SUMS = "fuse_elewise_add_act_ops"
_MISREAD = (
    "Paddle's fused operator reads beyond a bias of the shape [1, C, 1, 1], as convolutions add it:"
    " the numbers would be wrong"
)
_TWICE = "Paddle's pass misreads gradients of gradients: the numbers would be wrong"
# Why a pass was not run.
missing: dict[str, str] = {}
# The types of operators that a pass has added to the program.
done: dict[str, list[str]] = {}


def apply_tolerantly(
    apply: Callable[..., Any], main: Any, startup: Any, build_strategy: Any, attrs: dict[str, Any]
) -> Any:
    """Call APPLY, Paddle's apply_build_strategy, without the passes that this build lacks."""
    from paddle.base import core

    strategy = build_strategy._copy()
    missing.update(_misread(main))
    for name, passed in PASSES.items():
        if not getattr(strategy, name, False):
            continue
        try:
            core.get_pass(passed)
        except (ValueError, RuntimeError):
            missing[name] = "this build of Paddle has no such pass"
        if name in _ON_GPUS and device_kind() != "gpu":
            missing[name] = "Paddle supports it on GPUs only"
        if name in missing:
            setattr(strategy, name, False)
    enabled = [name for name in PASSES if getattr(strategy, name, False)]
    result = None
    # One at a time, to know what each of them changed.
    for name in enabled:
        for candidate in enabled:
            setattr(strategy, candidate, candidate == name)
        before = program.count(main)
        result = apply(main, startup, strategy, attrs)
        for op in program.operators(main):
            if op.type == "share_buffer" and program.role(op) & program.BACKWARD:
                # One with the role of the loss lets fleet divide the loss by the ranks once more.
                op._set_attr("op_role", program.BACKWARD)
        done[name] = sorted(program.count(main) - before)
    return result if enabled else apply(main, startup, strategy, attrs)


def _misread(main: Any) -> dict[str, str]:
    """Return the passes after which MAIN would compute wrong numbers, each with the reason.

    Seen on CPUs, without an error: NaN after a step on all ranks alike, for a sum beside an
    activation (2.6.2 and 3.3.1) and gradient penalties (3.3.1); ranks that differ (2.6.2).
    """
    if any(op.type.endswith("_grad_grad") for op in program.operators(main)):
        return dict.fromkeys((_SUMS, "enable_inplace"), _TWICE)
    shapes = (
        [block._find_var_recursive(op.input(entry)[0]).shape for entry in ("X", "Y")]
        for block in main.blocks
        for op in block.ops
        if op.type == "elementwise_add"
    )
    return {_SUMS: _MISREAD} if any(is_spread(first, second) for first, second in shapes) else {}


def is_spread(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether SECOND, a shape added to FIRST, has an extent of 1 where FIRST has more.

    >>> is_spread([-1, 8, 4, 4], [1, 8, 1, 1]), is_spread([-1, 8], [1]), is_spread([2, 3], [2, 3])
    (True, False, False)
    """
    aligned = first[len(first) - len(second) :]
    return len(second) > 1 and any(extent == 1 != wider for extent, wider in zip(second, aligned))
