"""How a job ended: one line for people, and a JSON document for programs; pure."""

from __future__ import annotations

from fleetrun.conversion import counted, duration
from fleetrun.run.events import Exited, Interrupted, spent
from fleetrun.typehints import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.model import LaunchPlan
    from fleetrun.run.events import Outcome, Recovered

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
    """Return the line with which a launch closes, after one about its restarts, if it had any."""
    outcome = ending.outcome
    if outcome.cause is None:
        word = "Done"
    else:
        word = "Stopped" if isinstance(outcome.cause, Interrupted) else "Failed"
    steps = ""
    if ending.steps is not None:
        steps = f" and {counted(ending.steps, 'step')}"
    attempts = f", {outcome.attempts} attempts" if outcome.attempts > 1 else ""
    return _restarts(ending.restarts) + (
        f"{word} after {duration(ending.seconds)}{steps}{attempts} (exit code {outcome.exit_code})."
    )


def _restarts(restarts: Sequence[Recovered]) -> str:
    r"""Sum up how long RESTARTS took, and each phase; of one, its own line has told the phases.

    >>> from fleetrun.run.events import Recovered
    >>> one = Recovered(1, 9.0, (("detected", 0.25), ("stopped", 1.0)), None, 12.0)
    >>> _restarts((one, one._replace(phases=(("detected", 0.5),), lost_steps=3)))
    '2 restarts took 1.75 s: detected 0.75, stopped 1.00 s; 3 steps lost.\n'
    >>> _restarts((one,))
    '1 restart took 1.25 s.\n'
    """
    if not restarts:
        return ""
    phases: dict[str, float] = {}
    # In the order of one with most phases: the first one has not waited.
    for restart in sorted(restarts, key=lambda restart: -len(restart.phases)):
        for name, seconds in restart.phases:
            phases[name] = phases.get(name, 0.0) + seconds
    known = [restart.lost_steps for restart in restarts if restart.lost_steps is not None]
    lost = sum(known) if known else None
    took = f"{counted(len(restarts), 'restart')} took {sum(phases.values()):.2f} s"
    return f"{took}: {spent((*phases.items(),), lost)}.\n" if len(restarts) > 1 else f"{took}.\n"


def document(ending: Ending, host: str) -> dict[str, Any]:
    """Return the JSON document about ENDING, from the launcher on HOST.

    Its keys: schema, event (ended), job_id, host, nodes (how many hosts), processes (of all hosts),
    began (seconds since 1970), seconds, steps (null: none reported), attempts, restarts (each with
    attempt, seconds, phases and lost steps), exit_code, verdict, rank and signal (of the process
    that failed first; null: none), and log (the run directory).
    """
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
