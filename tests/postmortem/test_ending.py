"""How a job ended, in one line and as a document."""

from __future__ import annotations

import signal

import plans
import pytest

from fleetrun.model import ExitStatus
from fleetrun.postmortem import ending
from fleetrun.postmortem.ending import Ending
from fleetrun.run.events import Exited, Interrupted, Outcome

WELL = Ending(Outcome(None), plans.plan(), 83.2, 1.7e9)
FAILED = Outcome(Exited(1, "rank 1", ExitStatus(7), at=2.5), attempts=3)
KILLED = Outcome(Exited(0, "rank 0", ExitStatus(signum=9), at=2.5))


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (WELL, "Done after 1 min 23 s (exit code 0)."),
        (WELL._replace(steps=1), "Done after 1 min 23 s and 1 step (exit code 0)."),
        (
            WELL._replace(outcome=FAILED, steps=120),
            "Failed after 1 min 23 s and 120 steps, 3 attempts (exit code 7).",
        ),
        (WELL._replace(outcome=KILLED), "Failed after 1 min 23 s (exit code 137)."),
        (
            WELL._replace(outcome=Outcome(Interrupted(signal.SIGINT, 1.0))),
            "Stopped after 1 min 23 s (exit code 130).",
        ),
    ],
)
def test_one_line_says_it(told: Ending, line: str) -> None:
    assert ending.line(told) == line
