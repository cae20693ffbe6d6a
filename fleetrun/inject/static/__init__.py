"""Implements the strategy in static graphs, by passes over the program.

Fleet's `minimize` writes one allreduce for each gradient into the program, and our passes rewrite
them right afterwards. The evidence is counted in the program that the executor then gets.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from .. import paddle_api, settings
from ..import_hooks import after_import, in_place_of, watch_method
from ..paddle_api import private_names
from . import (
    counting,
    fuse_allreduce,
    fuse_operators,
    fused_optimizer,
    gradient_merge,
    legacy_ops,
    program,
    refusals,
)
from .cpu import gloo

if TYPE_CHECKING:
    from ..evidence import Evidence
    from ..spec import StrategySpec

_META = "paddle.distributed.fleet.meta_optimizers"


def install(spec: StrategySpec, proof: Evidence) -> None:
    """Patch the modules that write and run static programs once they are imported."""
    gradient_merge.install()
    after_import("paddle.distributed.fleet.fleet", lambda module: _rewrite(module, proof))
    if paddle_api.has(private_names.STATIC_CPU):
        after_import(f"{_META}.common", lambda module: gloo.connect(module, proof))
    after_import(f"{_META}.raw_program_optimizer", _prepare)
    after_import("paddle.base.executor", lambda module: counting.watch(module, spec, proof))


def _prepare(module: Any) -> None:
    """Let Paddle leave the allreduces unfused, and skip passes that its build lacks."""

    def leave_unfused(optimizer: Any) -> None:
        if fuse_allreduce.rewrites():
            optimizer.fuse_all_reduce_ops = False

    watch_method(module.RawProgramOptimizer, "minimize_impl", before=leave_unfused)
    in_place_of(module, "apply_build_strategy")(fuse_operators.apply_tolerantly)


def _rewrite(module: Any, proof: Evidence) -> None:
    """Run our passes after each `minimize` of a static program."""
    minimized: weakref.WeakSet[Any] = weakref.WeakSet()

    def refuse(text: str, cause: Exception | None = None) -> None:
        if text:
            proof.note(text)
            proof.write()
            raise RuntimeError(text) from cause

    @in_place_of(module.Fleet, "_minimize_impl")
    def _minimize_impl(minimize: Any, self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        paddle: Any = sys.modules["paddle"]
        if paddle.in_dynamic_mode():
            return minimize(self, loss, *args, **kwargs)
        is_second = loss.block.program in minimized
        refuse(refusals.before(self.worker_num(), is_second=is_second))
        newer = refusals.needs_older_programs()
        startup = args[0] if args else kwargs.get("startup_program")
        startup = startup or paddle.static.default_startup_program()
        try:
            with legacy_ops.functions():
                result = minimize(self, loss, *args, **kwargs)
        except Exception as error:
            refuse(newer, error)
            raise
        if newer:
            # A Paddle that we do not know supports it; our passes do not.
            proof.note(newer)
            return result
        minimized.add(loss.block.program)
        refuse(refusals.after(loss.block.program, self.worker_num()))
        _run_passes(self, loss.block.program, startup)
        return result


def _run_passes(fleet: Any, main: Any, startup: Any) -> None:
    if gloo.is_used():
        # Not earlier: Paddle counts these operators to find the places of its allreduces.
        program.remove(main, gloo.STREAMS)
        program.remove(startup, gloo.STREAMS)
    gradient_merge.settle(main, startup)
    ranks, before = fleet.worker_num(), len(program.reductions(main))
    if ranks > 1 and fuse_allreduce.rewrites():
        fuse_allreduce.run(main, startup, fleet)
    program.keep_order(main)
    merges = fused_optimizer.run(main) if settings.effective("fuse_all_optimizer_ops") else ""
    counting.expected[main] = counting.Expectation(before, ranks, merges)
