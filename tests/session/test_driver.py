"""Two launchers of a session on one loop, over real connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ports
import pytest
from wire import turn_until

from fleetrun.run.loop import Loop
from fleetrun.session.driver import Meeting, Session
from fleetrun.session.messages import Failure, Offer, RosterMessage, Verdict
from fleetrun.session.terms import Terms

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = "127.0.0.1"
TERMS = Terms(2, 2, rdzv_timeout_s=60.0)


class Rank:
    """Keeps what the session decides for a launcher."""

    def __init__(self) -> None:
        self.has_obeyed = False
        self.verdicts: list[Verdict] = []
        self.rosters: list[RosterMessage] = []

    def obey(self) -> None:
        """Take note."""
        self.has_obeyed = True

    def plan(self, roster: RosterMessage) -> None:
        """Keep the roster."""
        self.rosters.append(roster)

    def run(self) -> None:
        """Start nothing."""

    def stop(self, failure: Failure) -> None:
        """Stop nothing."""

    def stand_by(self) -> None:
        """Wait."""

    def kill(self) -> None:
        """Kill nothing."""

    def conclude(self, verdict: Verdict) -> None:
        """Keep the verdict."""
        self.verdicts.append(verdict)


class Launchers:
    """The sessions of some launchers on one loop."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.port = ports.free(1)[0]
        self.sessions: list[Session] = []

    def start(
        self, name: str, *, serves: bool = False, terms: Terms = TERMS
    ) -> tuple[Session, Rank, list[str]]:
        """Let a launcher take part, or begin to."""
        addresses = (HERE,) if serves else ()
        meeting = Meeting(terms, HERE, (self.port,), "job", addresses=addresses)
        said: list[str] = []
        session = Session(meeting, name, host=name, say=said.append)
        session.handler = rank = Rank()
        session.open(self.loop)
        session.offer(Offer("", name, len(self.sessions), (7000,), ((),)))
        self.sessions.append(session)
        return session, rank, said


@pytest.fixture
def launchers() -> Iterator[Launchers]:
    """Launchers that are closed after the test."""
    made = Launchers()
    yield made
    for session in made.sessions:
        session.close()
    made.loop.close()


def test_two_launchers_make_a_roster(launchers: Launchers) -> None:
    _, first, _ = launchers.start("first", serves=True)
    _, second, _ = launchers.start("second")
    turn_until(launchers.loop, lambda: first.rosters and second.rosters)
    assert first.rosters == second.rosters


def test_the_coordinators_terms_hold_and_what_others_asked_for_is_one_line(
    launchers: Launchers,
) -> None:
    first, _, said = launchers.start("first", serves=True)
    asked = TERMS._replace(heartbeat_timeout_s=60.0, max_restarts=3, least=1)
    second, rank, told = launchers.start("second", terms=asked)
    turn_until(launchers.loop, lambda: rank.rosters)
    assert second.terms == first.terms == TERMS
    assert rank.has_obeyed
    (line,) = told
    assert line.startswith("127.0.0.1 coordinates the job, with its own options: --nnodes=2 (here")
    assert "--max_restart=0 (here 3), --heartbeat_timeout=10 (here 60)." in line
    assert not said


def test_who_leaves_while_it_is_being_connected_is_not_waited_for(launchers: Launchers) -> None:
    _, first, _ = launchers.start("first", serves=True)
    second, _, _ = launchers.start("second")
    second.quit(Failure("second", "interrupted", 143))
    assert second.is_busy
    turn_until(launchers.loop, lambda: first.verdicts)
    failure = first.verdicts[0].failure
    assert failure is not None
    assert (failure.host, failure.what, failure.exit_code) == ("second", "interrupted", 143)
    turn_until(launchers.loop, lambda: not second.is_busy)


def test_who_leaves_when_nobody_is_there_to_hear_it_ends_at_once(launchers: Launchers) -> None:
    second, _, _ = launchers.start("second")
    turn_until(launchers.loop, lambda: "refused" in second.missing())
    second.quit(Failure("second", "interrupted", 143))
    turn_until(launchers.loop, lambda: not second.is_busy)


def test_strangers_leave_room_for_what_is_said_of_hosts(launchers: Launchers) -> None:
    session, _, said = launchers.start("first", serves=True)
    for number in range(100):
        session._caller_refused(f"10.0.1.{number}", "has another token")
    assert len(said) == 32
    session.shown("node-2 cannot take part: --run_mode is rpc there")
    assert said[-1].startswith("node-2 cannot take part")
