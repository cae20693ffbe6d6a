"""The moments of failures, and so the first one."""

from __future__ import annotations

import plans
import pytest

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


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("loss", [ExitStatus(signum=6), ExitStatus(signum=11), ExitStatus(1)])
def test_a_rank_that_was_killed_comes_before_peers_that_ended_with_it(
    first: int, loss: ExitStatus
) -> None:
    # They are found in one look, but noted one after another: on a busy machine, slowly.
    ends = [ExitStatus(signum=9), loss]
    exits = [
        Exited(process, f"rank {process}", ends[process], at=2.0 + 0.2 * (process != first))
        for process in (first, 1 - first)
    ]
    assert culprit(examine(plans.plan(), tuple(exits))).process == 0
