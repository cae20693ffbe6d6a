"""How a job ended, in one line."""

from __future__ import annotations

import signal

import pytest

from fleetrun.model import ExitStatus
from fleetrun.postmortem import ending
from fleetrun.run.events import Exited, Interrupted, Outcome

FAILED = Outcome(Exited(1, "rank 1", ExitStatus(7), at=2.5), attempts=3)
STOPPED = Outcome(Interrupted(signal.SIGINT, 1.0))


@pytest.mark.parametrize(
    ("outcome", "step", "line"),
    [
        (Outcome(None), 1, "Done after 1 min 23 s and 1 step (exit code 0)."),
        (FAILED, 120, "Failed after 1 min 23 s and 120 steps, 3 attempts (exit code 7)."),
        (STOPPED, None, "Stopped after 1 min 23 s (exit code 130)."),
    ],
)
def test_one_line_says_it(outcome: Outcome, step: int | None, line: str) -> None:
    assert ending.line(outcome, 83.2, step) == line
