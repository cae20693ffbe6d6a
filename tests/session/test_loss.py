"""The guard of a killed launcher tells the others, over real connections."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import pytest
from launchers import HERE, Launchers
from wire import turn_until

from fleetrun.session import member
from fleetrun.session.loss import LossReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleetrun.session.connection import Connection
    from fleetrun.session.driver import Session


class Job(Launchers):
    """Two launchers whose ranks run."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[LossReport] = []
        self.first, self.rank, _ = self.take_part("first", serves=True)
        self.second, self.other, _ = self.take_part("second")
        turn_until(self.loop, lambda: self.rank.rosters and self.other.rosters)
        for launched in self.launched:
            launched.session.planned(None)
        turn_until(self.loop, self._are_running)

    def _are_running(self) -> bool:
        known = [launched.session._member for launched in self.launched]
        return all(state is not None and state.phase == member.RUNNING for state in known)

    def kill(self, session: Session) -> LossReport:
        """Let a launcher end silently, and its guard report that."""
        target = session._connected_to
        assert target is not None
        session.close()
        report = session.loss_report(self.loop, target)
        assert isinstance(report, LossReport)
        self.reports.append(report)
        return report


@pytest.fixture
def job() -> Iterator[Job]:
    """Return a job that is closed after the test."""
    made = Job()
    yield made
    for report in made.reports:
        report.close()
    made.close()


def test_the_coordinator_hears_that_a_launcher_was_killed_and_then_that_no_rank_is_left(
    job: Job,
) -> None:
    report = job.kill(job.second)
    turn_until(job.loop, lambda: job.rank.stopped)
    (why,) = job.rank.stopped
    assert (why.what, why.host) == ("fleetrun was lost", "127.0.0.1 (second)")
    coordinator = job.first._coordinator
    assert coordinator is not None
    assert coordinator.not_before > 0
    report.ended()
    turn_until(job.loop, lambda: report.is_done)
    turn_until(job.loop, lambda: _not_before(job.first) < 0)


def _not_before(session: Session) -> float:
    assert session._coordinator is not None
    return session._coordinator.not_before


def test_a_coordinator_that_hangs_up_and_listens_no_more_is_lost(job: Job) -> None:
    job.first.close()
    turn_until(job.loop, lambda: job.other.stopped)
    (why,) = job.other.stopped
    assert (why.what, why.host) == ("the coordinator of the job was lost", HERE)
    job.second.stopped(why)
    turn_until(job.loop, lambda: job.other.verdicts)


def test_a_coordinator_that_a_firewall_hides_may_come_back(job: Job) -> None:
    assert job.second._connection is not None
    assert job.first._listener is not None
    reset(job.second._connection)
    # A firewall does this with `--reject-with tcp-reset`.
    job.first._listener.close()
    dialer = job.second._dialer
    assert dialer is not None
    turn_until(job.loop, lambda: "refused" in dialer.trouble)
    assert not job.other.stopped


def reset(connection: Connection) -> None:
    """Reset CONNECTION on both ends, as a firewall does."""
    linger = struct.pack("ii", 1, 0)
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.lose("connection reset by peer")
