"""The sessions of some launchers on one loop, over real connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ports

from fleetrun.run.loop import Loop
from fleetrun.session.config import RendezvousConfig
from fleetrun.session.driver import RendezvousEndpoint, Session, SessionHandler
from fleetrun.session.messages import JoinRequest, RosterMessage, Verdict

if TYPE_CHECKING:
    from fleetrun.run.events import Failure

HERE = "127.0.0.1"
CONFIG = RendezvousConfig(2, 2, rdzv_timeout_s=60.0)


class Rank(SessionHandler):
    """Keeps what the session decides for a launcher."""

    def __init__(self) -> None:
        self.has_obeyed = False
        self.stopped: list[Failure] = []
        self.verdicts: list[Verdict] = []
        self.rosters: list[RosterMessage] = []

    def obey(self) -> None:
        """Take note."""
        self.has_obeyed = True

    def plan(self, roster: RosterMessage) -> None:
        """Keep the roster."""
        self.rosters.append(roster)

    def stop(self, failure: Failure, *, is_fenced: bool = False) -> None:
        """Keep the reason."""
        self.stopped.append(failure)

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
        self, name: str, *, serves: bool = False, config: RendezvousConfig = CONFIG
    ) -> tuple[Session, Rank, list[str]]:
        """Let a launcher take part, or begin to."""
        endpoint = RendezvousEndpoint(
            config,
            HERE,
            (self.port,),
            "job",
            addresses=(HERE,) if serves else (),
            may_be_second=True,
        )
        said: list[str] = []
        session = Session(endpoint, name, host=name, log=said.append)
        session.handler = rank = Rank()
        session.open(self.loop)
        session.join(JoinRequest("", name, len(self.sessions), (7000,), ((),)))
        self.sessions.append(session)
        return session, rank, said
