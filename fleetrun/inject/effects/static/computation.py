"""Paddle's own passes that fuse computation: run what this build has, and say what it lacks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from . import program

if TYPE_CHECKING:
    from collections.abc import Callable

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
NOTHING = "Paddle's pass found nothing in this program that it could fuse"
# Why a pass was not run.
missing: dict[str, str] = {}
# The types of operators that a pass has put into the program.
done: dict[str, dict[str, int]] = {}


def tolerant(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return APPLY (Paddle's apply_build_strategy) that passes over what this build lacks."""

    @functools.wraps(apply)
    def apply_build_strategy(
        main: Any,  # noqa: ANN401 - Paddle's types
        startup: Any,  # noqa: ANN401
        build_strategy: Any,  # noqa: ANN401
        attrs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        from paddle.base import core

        wanted = build_strategy._copy()  # noqa: SLF001
        for name, passed in PASSES.items():
            if not getattr(wanted, name, False):
                continue
            try:
                core.get_pass(passed)
            except (ValueError, RuntimeError):
                missing[name] = "this build of Paddle has no such pass"
                setattr(wanted, name, False)
        asked = [name for name in PASSES if getattr(wanted, name, False)]
        result = None
        # One at a time: so each is known by what it has changed.
        for name in asked:
            for other in asked:
                setattr(wanted, other, other == name)
            before = program.count(main)
            result = apply(main, startup, wanted, attrs)
            after = program.count(main)
            done[name] = {
                kind: number for kind, number in after.items() if number > before.get(kind, 0)
            }
        return result if asked else apply(main, startup, wanted, attrs)

    return apply_build_strategy
