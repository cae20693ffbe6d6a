"""Counts the operators of each program that an executor runs, and reports them as evidence."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import border, settings
from ..evidence import plural
from ..import_hooks import in_place_of
from . import (
    fuse_operators,
    fused_optimizer,
    meta_optimizers,
    program,
    program_runs,
    reduction_report,
)
from .cpu import channels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..evidence import Evidence
    from ..spec import StrategySpec


class Expectation(NamedTuple):
    """The facts about a program when it was rewritten."""

    before: int
    ranks: int
    # Why no updates were merged.
    merges: str


_watching = border.watching("the count of operators")
_expected: weakref.WeakKeyDictionary[Any, Expectation] = weakref.WeakKeyDictionary()


def expect(main: Any, *, before: int, ranks: int, merges: str) -> None:
    """Remember that MAIN had BEFORE allreduces, and why no updates were merged (MERGES)."""
    _expected[main] = Expectation(before, ranks, merges)


def watch(module: Any, spec: StrategySpec, proof: Evidence) -> None:
    """Inspect each program that an executor gets, and count its runs."""
    watcher = Watcher(spec, proof)
    atexit.register(watcher.end)

    @in_place_of(module._ExecutorCache, "_get_program_and_executor")
    def _get_program_and_executor(build: Any, self: Any, cached: Any) -> Any:
        built = build(self, cached)
        watcher.look(cached.program, built[0])
        return built

    program_runs.watch(module.Executor)


def _merged_steps() -> int:
    """Return how many runs make one update of a merging program, whether ours or Paddle's."""
    return int((settings.effective("gradient_merge_configs") or {}).get("k_steps", 1))


class Watcher:
    """Observes the programs that run."""

    def __init__(self, spec: StrategySpec, proof: Evidence) -> None:
        self._spec = spec
        self._proof = proof
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        # Whether fleet has made a program that runs.
        self._is_fleets = False

    @_watching
    def look(self, main: Any, running: Any) -> None:
        """Count the operators of RUNNING, which the executor made of MAIN."""
        main = program_runs.bare(main)
        if not program.updates(running) or main in self._seen:
            return
        merges = any(
            op.type == "conditional_block" and program.holds_updates(op)
            for op in running.global_block().ops
        )
        self._seen.add(main)
        if merges:
            program_runs.merge(main, _merged_steps())
        self._proof.graph = "static"
        expectation = _expected.get(main)
        if expectation is None:
            # The strategy does not apply to a program made without fleet, so it is not reported.
            if self._is_fleets:
                return
            expectation = Expectation(0, 1, "")
        else:
            self._is_fleets = True
            reduction_report.report(running, expectation.before, expectation.ranks, self._proof)
        for name, evidence, reason in (
            _merging(running, merges=merges),
            *_fused_operators(running),
            self._fused_updates(running, expectation.merges),
            *meta_optimizers.look(running),
        ):
            self._report(name, evidence, reason)

    @_watching
    def end(self) -> None:
        """Note micro-steps that were merged and never applied."""
        left = program_runs.dropped()
        if left:
            steps = f"{plural(left, 'micro-step')} of a partial round"
            self._proof.note(f"{steps} {'was' if left == 1 else 'were'} dropped")
            self._proof.write()

    def _report(self, name: str, evidence: str, reason: str) -> None:
        """Report the switch NAME, if it is on: by its EVIDENCE, or why it has none.

        If only its details were requested, the script has enabled it: they are reported instead.
        """
        if not settings.is_on(name):
            return
        holds = bool(evidence)
        if self._spec.asked(name) is None:
            name = f"{name}_configs"
            evidence += "; the script switches it on"
            if self._spec.asked(name) is None:
                return
        settings.report(name, holds=holds, evidence=evidence, reason=reason)

    def _fused_updates(self, running: Any, why_not: str) -> tuple[str, str, str]:
        ops = [op for op in program.updates(running) if op.type in fused_optimizer.MERGED]
        sizes = [len(op.input("Param")) for op in ops]
        kinds = ", ".join(sorted({op.type for op in ops}))
        evidence = f"{sum(sizes)} parameters are updated by {len(ops)} {kinds}" if ops else ""
        if ops:
            self._proof.counts["merged_updates"] = sizes
        return "fuse_all_optimizer_ops", evidence, why_not or "Paddle has fused nothing"


def _merging(running: Any, *, merges: bool) -> tuple[str, str, str]:
    steps = _merged_steps()
    inside = sum(
        channels.channel_of(op) is not None or op.type in program.ALLREDUCES
        for block in running.blocks[1:]
        for op in block.ops
    )
    evidence = f"updates and {inside} allreduces are in a block run once in {steps} steps"
    reason = "one step is not merged" if steps == 1 else "Paddle has merged nothing"
    return "gradient_merge", evidence if merges else "", reason


def _fused_operators(running: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each of Paddle's passes that was tried, and which of its operators still run."""
    counts = program.count(running)
    for name in fuse_operators.PASSES:
        # Where one was not run, the launcher's own report says why.
        if name in fuse_operators.done or name in fuse_operators.missing:
            still = [kind for kind in sorted(fuse_operators.done.get(name, {})) if kind in counts]
            evidence = ", ".join(f"{counts[kind]} {kind}" for kind in still)
            yield name, evidence, fuse_operators.missing.get(name, fuse_operators.NOTHING)
