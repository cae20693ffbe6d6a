"""The moments of failures, and so the first one."""

from __future__ import annotations

import plans

from fleetrun.model import ExitStatus
from fleetrun.postmortem.failures import examine
from fleetrun.run.events import Exited
from fleetrun.run.policy import culprit


def test_a_crash_comes_after_an_end_that_was_seen_before_it() -> None:
    ended = Exited(1, "rank 1", ExitStatus(7), at=2.0)
    crashed = Exited(0, "rank 0", ExitStatus(signum=11), at=2.02)
    assert culprit(examine(plans.plan(), (ended, crashed))).process == 1
    # Alone it is set back: what is seen of it comes a little later than what it does to others.
    (alone,) = examine(plans.plan(), (crashed,))
    assert alone.failed_at is not None
    assert alone.failed_at < crashed.at


def test_a_crash_does_not_come_before_the_start() -> None:
    crashed = Exited(0, "rank 0", ExitStatus(signum=7), at=2.02, lived_s=0.02)
    (examined,) = examine(plans.plan(), (crashed,))
    assert examined.failed_at == crashed.at - crashed.lived_s
