"""Counts the operators that Paddle's own meta optimizers have put into a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import settings
from . import program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SHARDS = ("c_broadcast", "broadcast", "c_reduce_sum", "reduce")
# Paddle's numbers for 16-bit types in attributes of operators.
FLOAT16, _BFLOAT16 = 4, 22
_NOT_APPLIED = "Paddle has not applied it to the program"


def look(running: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each field of Paddle's meta optimizers, its evidence, or why it has none."""
    counts = program.count(running)
    for name, (count, reason) in _COUNTS.items():
        evidence = count(running, counts)
        yield name, evidence, "" if evidence else reason(running, counts)


def _named(*kinds: str) -> Callable[[Any, dict[str, int]], str]:
    def count(_running: Any, counts: dict[str, int]) -> str:
        return ", ".join(f"{counts[kind]} {kind}" for kind in kinds if kind in counts)

    return count


def casts(running: Any, *kinds: int) -> int:
    """Count the casts to KINDS, Paddle's numbers for types, in the program RUNNING."""
    return sum(
        op.type == "cast" and op.attr("out_dtype") in kinds for op in program.operators(running)
    )


def _casts(running: Any, counts: dict[str, int]) -> str:
    number = casts(running, FLOAT16, _BFLOAT16)
    checks = counts.get("check_finite_and_unscale", 0)
    return f"{number} casts to 16 bits, {checks} check_finite_and_unscale" if number else ""


def _no_casts(_running: Any, counts: dict[str, int]) -> str:
    if "check_finite_and_unscale" not in counts:
        return _NOT_APPLIED
    return "Paddle only scales the loss here, and computes in 32 bits"


def _again(running: Any, _found: dict[str, int]) -> str:
    recomputed = sum(
        any(".subprog_" in name for name in op.output_arg_names)
        for op in running.global_block().ops
    )
    return f"{recomputed} operators are recomputed in the backward pass" if recomputed else ""


def _no_checkpoints(_running: Any, _found: dict[str, int]) -> str:
    if not (settings.effective("recompute_configs") or {}).get("checkpoints"):
        return "recompute_configs names no checkpoints, and Paddle finds none by itself"
    return _NOT_APPLIED


def _averages(running: Any, _found: dict[str, int]) -> str:
    first, *inner = running.blocks
    if any(
        op.type in program.ALLREDUCES and program.role(op) & program.BACKWARD for op in first.ops
    ):
        return ""
    moved = sum(op.type in program.ALLREDUCES for block in inner for op in block.ops)
    blocks = sum(op.type == "conditional_block" for op in first.ops)
    if not moved or not blocks:
        return ""
    return f"{moved} allreduces are in blocks that only some steps run; none of them sums gradients"


def _still_sums(_running: Any, counts: dict[str, int]) -> str:
    if "conditional_block" not in counts:
        return "Paddle supports it for Momentum and SGD only, and has not applied it here"
    return "gradients are still summed at each step"


def _only_for(kinds: str) -> Callable[[Any, dict[str, int]], str]:
    def reason(running: Any, _found: dict[str, int]) -> str:
        present = ", ".join(sorted({op.type for op in program.updates(running)}))
        return f"Paddle replaces {kinds} only; here: {present}"

    return reason


def _absent(_running: Any, _found: dict[str, int]) -> str:
    return _NOT_APPLIED


_COUNTS: dict[
    str, tuple[Callable[[Any, dict[str, int]], str], Callable[[Any, dict[str, int]], str]]
] = {
    "amp": (_casts, _no_casts),
    "recompute": (_again, _no_checkpoints),
    "lars": (_named("lars_momentum"), _only_for("Momentum")),
    "lamb": (_named("lamb"), _only_for("Adam")),
    "dgc": (_named("dgc", "dgc_momentum"), _only_for("Momentum")),
    "sharding": (_named(*_SHARDS), _absent),
    "localsgd": (_averages, _still_sums),
    "adaptive_localsgd": (_averages, _still_sums),
}
