"""How a job ended, in one line; pure."""

from __future__ import annotations

from collections.abc import Sequence

from fleetrun.run.events import Interrupted, Outcome, Recovered
from fleetrun.text import counted, format_duration


def line(
    outcome: Outcome, seconds: float, last_step: int | None, restarts: Sequence[Recovered] = ()
) -> str:
    """Return the line with which a launch closes after SECONDS, and RESTARTS.

    >>> line(Outcome(None), 83.2, 30)
    'Done after 1 min 23 s and 30 steps (exit code 0).'
    """
    failed = "Stopped" if isinstance(outcome.cause, Interrupted) else "Failed"
    steps = "" if last_step is None else f" and {counted(last_step, 'step')}"
    attempts = f", {outcome.attempts} attempts" if outcome.attempts > 1 else ""
    if restarts:
        attempts += f" ({sum(restart.seconds for restart in restarts):.1f} s to restart)"
    word = "Done" if outcome.cause is None else failed
    return (
        f"{word} after {format_duration(seconds)}{steps}{attempts} (exit code {outcome.exit_code})."
    )
