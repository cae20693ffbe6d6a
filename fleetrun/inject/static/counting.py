"""Counts the operators of each program that an executor runs, and reports them as evidence."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import border, settings
from ..import_hooks import in_place_of
from . import (
    fuse_operators,
    fused_optimizer,
    gradient_merge,
    meta_optimizers,
    program,
    program_runs,
    reduction_report,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..evidence import Evidence
    from ..spec import StrategySpec


class Expectation(NamedTuple):
    """The facts about a program when it was rewritten, and why no updates were merged."""

    before: int
    ranks: int
    merges: str


_watching = border.watching("the count of operators")
# By program that was rewritten.
expected: weakref.WeakKeyDictionary[Any, Expectation] = weakref.WeakKeyDictionary()


def watch(module: Any, spec: StrategySpec, proof: Evidence) -> None:
    """Inspect each program that an executor gets, and count its runs."""
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    @_watching
    def look(main: Any, running: Any) -> None:
        main = program_runs.bare(main)
        if program.updates(running) and main not in seen:
            seen.add(main)
            report(main, running, spec, proof)

    @in_place_of(module._ExecutorCache, "_get_program_and_executor")
    def _get_program_and_executor(build: Any, self: Any, cached: Any) -> Any:
        built = build(self, cached)
        look(cached.program, built[0])
        return built

    @in_place_of(module.Executor, "_prune_program")
    def _prune_program(prune: Any, _executor: Any, main: Any, *args: Any, **options: Any) -> Any:
        whole = program_runs.bare(main)
        # Paddle would prune the block of merged updates, and train nothing.
        is_merging = any(map(program.merged_updates, whole.global_block().ops))
        pruned = main if is_merging else prune(main, *args, **options)
        if whole in expected:
            expected[program_runs.bare(pruned)] = expected[whole]
        return pruned

    atexit.register(_watching(lambda: proof.note_dropped(program_runs.dropped())))
    program_runs.watch(module.Executor)


def report(main: Any, running: Any, spec: StrategySpec, proof: Evidence) -> None:
    """Report the operators of RUNNING, which the executor made of MAIN."""
    steps = int((settings.effective("gradient_merge_configs") or {}).get("k_steps", 1))
    is_merging = any(map(program.merged_updates, running.global_block().ops))
    if is_merging:
        gradient_merge.check(main)
        program_runs.merge(main, steps)
    proof.graph = "static"
    expectation = expected.get(main)
    if expectation is not None:
        reduction_report.report(running, expectation.before, expectation.ranks, proof)
    elif expected:
        # The strategy does not apply to a program made without fleet, so it is not reported.
        return
    for name, evidence, reason in (
        _merging(running, steps, is_merging=is_merging),
        *_fused_operators(running),
        _fused_updates(running, expectation.merges if expectation else "", proof),
        *meta_optimizers.look(running),
    ):
        if not settings.is_on(name):
            continue
        field, text = name, evidence
        if spec.asked(name) is None:
            # Only its details were requested: the script has enabled it.
            field, text = f"{name}_configs", f"{evidence}; the script switches it on"
        if spec.asked(field) is not None:
            settings.report(field, holds=bool(evidence), evidence=text, reason=reason)


def _merging(running: Any, steps: int, *, is_merging: bool) -> tuple[str, str, str]:
    inside = len(reduction_report.buckets(running))
    evidence = f"updates and {inside} allreduces are in a block run once in {steps} steps"
    reason = "one step is not merged" if steps == 1 else "Paddle has merged nothing"
    return "gradient_merge", evidence if is_merging else "", reason


def _fused_operators(running: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each of Paddle's passes that was tried, and which of its operators still run."""
    counts = program.count(running)
    for name in fuse_operators.PASSES:
        # Where one was not run, the launcher's own report says why.
        if name in fuse_operators.done or name in fuse_operators.missing:
            still = [kind for kind in fuse_operators.done.get(name, ()) if kind in counts]
            evidence = ", ".join(f"{counts[kind]} {kind}" for kind in still)
            yield name, evidence, fuse_operators.missing.get(name, fuse_operators.NOTHING)


def _fused_updates(running: Any, why_not: str, proof: Evidence) -> tuple[str, str, str]:
    ops = [op for op in program.updates(running) if op.type in fused_optimizer.MERGED]
    sizes = [len(op.input("Param")) for op in ops]
    kinds = ", ".join(sorted({op.type for op in ops}))
    if ops:
        proof.counts["merged_updates"] = sizes
    evidence = f"{sum(sizes)} parameters are updated by {len(ops)} {kinds}" if ops else ""
    return "fuse_all_optimizer_ops", evidence, why_not or "Paddle has fused nothing"
