"""The sessions of some launchers on one loop, over real connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import ports

from fleetrun.run.loop import Loop
from fleetrun.session.driver import RendezvousEndpoint, Session, SessionHandler
from fleetrun.session.messages import READY, RendezvousConfig, RosterMessage, Verdict

if TYPE_CHECKING:
    from fleetrun.run.events import Failure

HERE = "127.0.0.1"
CONFIG = RendezvousConfig(2, 2, rdzv_timeout_s=60.0)


class Rank(SessionHandler):
    """Keeps what the session decides for a launcher; without ranks, it ANSWERS at once."""

    has_ranks = True

    def __init__(self, session: Session, *, answers: bool) -> None:
        self._session = session if answers else None
        self.runs = 0
        self.stopped: list[Failure] = []
        self.verdicts: list[Verdict] = []
        self.rosters: list[RosterMessage] = []

    def plan(self, roster: RosterMessage) -> None:
        """Keep the roster."""
        self.rosters.append(roster)
        if self._session is not None:
            self._session.report(READY)

    def run(self) -> None:
        """Start."""
        self.runs += 1

    def stop(self, failure: Failure) -> None:
        """Keep the reason."""
        self.stopped.append(failure)
        if self._session is not None:
            self._session.stopped(None)

    def conclude(self, verdict: Verdict) -> None:
        """Keep the verdict."""
        self.verdicts.append(verdict)


class Launched(NamedTuple):
    """A launcher of the job, and the remarks on its console."""

    session: Session
    handler: Rank
    remarks: list[str]


class Launchers:
    """The sessions of some launchers on one loop."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.port = ports.free(1)[0]
        self.launched: list[Launched] = []

    def start(
        self,
        name: str,
        *,
        serves: bool = False,
        config: RendezvousConfig = CONFIG,
        answers: bool = False,
        **endpoint: Any,
    ) -> Launched:
        """Start a launcher at an ENDPOINT; its host's name has the number of its own name."""
        address = HERE if serves else ""
        usual = RendezvousEndpoint(config, HERE, self.port, "default", address=address)
        remarks: list[str] = []
        host = name.replace("launcher", "node")
        session = Session(usual._replace(**endpoint), name, host=host, log=remarks.append)
        session.handler = handler = Rank(session, answers=answers)
        session.open(self.loop)
        self.launched.append(Launched(session, handler, remarks))
        return self.launched[-1]

    def close(self) -> None:
        """End all that were started."""
        for launched in self.launched:
            launched.session.close()
        self.loop.close()
