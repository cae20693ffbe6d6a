"""How a job ended: one line for people, and a JSON document for programs; pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from fleetrun.model import LaunchPlan
from fleetrun.run.events import Exited, Interrupted, Outcome, Recovered
from fleetrun.text import counted, format_duration

SCHEMA = 1


class Ending(NamedTuple):
    """The end of a job: how long it took in seconds, and the last step that a rank reported."""

    outcome: Outcome
    plan: LaunchPlan
    seconds: float
    # When it began, in seconds since 1970.
    began: float
    steps: int | None = None
    # How it has started again.
    restarts: tuple[Recovered, ...] = ()


def line(ending: Ending) -> str:
    """Return the line with which a launch closes."""
    outcome = ending.outcome
    failed = "Stopped" if isinstance(outcome.cause, Interrupted) else "Failed"
    steps = "" if ending.steps is None else f" and {counted(ending.steps, 'step')}"
    attempts = f", {outcome.attempts} attempts" if outcome.attempts > 1 else ""
    if ending.restarts:
        attempts += f" ({sum(restart.seconds for restart in ending.restarts):.1f} s to restart)"
    took = format_duration(ending.seconds)
    word = "Done" if outcome.cause is None else failed
    return f"{word} after {took}{steps}{attempts} (exit code {outcome.exit_code})."


def document(ending: Ending, host: str) -> dict[str, Any]:
    """Return the JSON document about ENDING, from the launcher on HOST; docs/watching.md has it."""
    outcome, plan = ending.outcome, ending.plan
    cause = outcome.cause
    rank = signal = None
    if isinstance(cause, Exited):
        spec = plan.processes[cause.process] if cause.process < len(plan.processes) else None
        rank = spec.rank.rank if spec is not None and spec.rank is not None else None
        signal = cause.status.signum
    return {
        "schema": SCHEMA,
        "event": "ended",
        "job_id": plan.job_id,
        "host": host,
        "nodes": len(plan.nodes),
        "processes": len(plan.ranks),
        "began": ending.began,
        "seconds": round(ending.seconds, 3),
        "steps": ending.steps,
        "attempts": outcome.attempts,
        "restarts": [restart.document() for restart in ending.restarts],
        "exit_code": outcome.exit_code,
        "verdict": outcome.describe(),
        "rank": rank,
        "signal": signal,
        "log": plan.run_dir,
    }
