"""Counts the operators that Paddle's own meta optimizers have put into a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import settings
from . import program, reduction_report

if TYPE_CHECKING:
    from collections.abc import Iterator

# By field: the operators that show it, and why there may be none of them.
_NOT_APPLIED = "Paddle has not applied it to the program"
_OPERATORS = {
    "lars": (("lars_momentum",), "Paddle replaces Momentum only"),
    "lamb": (("lamb",), "Paddle replaces Adam only"),
    "dgc": (("dgc", "dgc_momentum"), "Paddle replaces Momentum only"),
    "sharding": (("c_broadcast", "broadcast", "c_reduce_sum", "reduce"), _NOT_APPLIED),
}
_REPLACING = ("lars", "lamb", "dgc")
# Paddle's numbers for 16-bit types in attributes of operators.
_SHORT = (4, 22)


def look(running: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each field of Paddle's meta optimizers, its evidence, or why it has none."""
    counts = program.count(running)
    present = ", ".join(sorted({op.type for op in program.updates(running)}))
    for name, (kinds, reason) in _OPERATORS.items():
        evidence = ", ".join(f"{counts[kind]} {kind}" for kind in kinds if kind in counts)
        yield name, evidence, f"{reason}; here: {present}" if name in _REPLACING else reason
    checks = counts.get("check_finite_and_unscale", 0)
    casts = [op for op in program.operators(running) if op.type == "cast"]
    number = sum(op.attr("out_dtype") in _SHORT for op in casts)
    evidence = f"{number} casts to 16 bits, {checks} check_finite_and_unscale" if number else ""
    only_scaled = "Paddle only scales the loss here, and computes in 32 bits"
    yield "amp", evidence, only_scaled if checks else _NOT_APPLIED
    yield "recompute", *_recomputed(running)
    for name in ("localsgd", "adaptive_localsgd"):
        yield name, *_averaged(running, counts)


def _recomputed(running: Any) -> tuple[str, str]:
    ops = running.global_block().ops
    recomputed = sum(any(".subprog_" in name for name in op.output_arg_names) for op in ops)
    if recomputed:
        return f"{recomputed} operators are recomputed in the backward pass", ""
    if not (settings.effective("recompute_configs") or {}).get("checkpoints"):
        return "", "recompute_configs names no checkpoints, and Paddle finds none by itself"
    return "", _NOT_APPLIED


def _averaged(running: Any, counts: dict[str, int]) -> tuple[str, str]:
    if "conditional_block" not in counts:
        return "", "Paddle supports it for Momentum and SGD only, and has not applied it here"
    moved = sum(op.type in program.ALLREDUCES for block in running.blocks[1:] for op in block.ops)
    if not moved or reduction_report.buckets(running):
        return "", "gradients are still summed"
    return f"{moved} allreduces, none of a gradient, are in blocks that only some steps run", ""
