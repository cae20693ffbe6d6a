"""The end of a session: the coordinator's host records how each host ended, and collects logs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from fleetrun.model import LaunchPlan
from fleetrun.run.events import Failure
from fleetrun.run.loop import Waiting
from fleetrun.rundir import hostsfile, names
from fleetrun.rundir.folder import Folder
from fleetrun.session.driver import Session
from fleetrun.session.exchange import Dismissed, LogPart, SendLog
from fleetrun.watch import log_collection
from fleetrun.watch.log_collection import LogCollector, LogServer

_AGAIN_S = 0.5


class SessionEnd:
    """Leaves SESSION when the job has ended, and with GATHER_LOGS when the logs are copied."""

    def __init__(
        self,
        plan: LaunchPlan,
        session: Session,
        folder: Folder,
        *,
        log: Callable[[str], None],
        redact: Callable[[str], str],
        gather_logs: str | None = None,
    ) -> None:
        self._plan = plan
        self._session = session
        self._folder = folder
        self._log = log
        self._redact = redact
        self._gather_logs = gather_logs
        self._server: LogServer | None = None
        self._collector: LogCollector | None = None
        self._leave_later: Callable[[], None] | None = None

    def open(self, waiting: Waiting) -> None:
        """Prepare to collect logs, or to serve those of this host."""
        self._waiting = waiting
        self._equip()

    def _equip(self) -> None:
        """Gather logs if this is the coordinator's host, else serve them."""
        if self._gather_logs is None:
            return

        session = self._session
        if session.serves and self._collector is None:
            self._server = None
            collector = self._collector = log_collection.LogCollector(
                self._plan,
                self._folder,
                waiting=self._waiting,
                ask=session.to_member,
                is_there=lambda node_rank: node_rank in session.connected(),
                done=self._log,
                everything=self._gather_logs == log_collection.ALL,
            )
            session.hearers[LogPart] = collector.take
        elif not session.serves and self._server is None:
            if self._collector is not None:
                self._collector.close()
                self._collector = None
            server = self._server = log_collection.LogServer(self._plan, session.to_coordinator)
            session.hearers[SendLog] = lambda _, message: server.asked(message)
            session.hearers[Dismissed] = lambda _, __: self._leave()

    def take(self, plan: LaunchPlan, attempt: int) -> None:
        """Take the PLAN of another generation, which is ATTEMPT on this host."""
        self._plan = plan
        self._equip()
        if self._server is not None:
            self._server.take(plan, attempt)
        if self._collector is not None:
            self._collector.plan = plan

    @property
    def is_busy(self) -> bool:
        """Whether logs are still being copied."""
        is_collecting = self._collector is not None and self._collector.is_busy
        return is_collecting or self._leave_later is not None

    def finish(self, left: Failure | None) -> None:
        """Leave the session because of LEFT, which is a failure if there is no verdict yet."""
        # The others go on without a host that departs, once it is gone.
        is_departure = left is not None and left.is_departure
        if self._session.serves:
            self._write_ends()
            self._session.quit(left)
            if self._collector is not None and not is_departure:
                self._collector.begin(self._session.connected())
                self._dismiss()
        elif self._server is not None and self._session.is_connected and not is_departure:
            self._server.complete()
            self._leave_later = partial(self._session.quit, left)
            self._stay()
        else:
            self._session.quit(left)

    def close(self) -> None:
        """Stop."""
        if self._collector is not None:
            self._collector.close()

    def _write_ends(self) -> None:
        try:
            hostsfile.write(self._folder, self._session.host_ends(), self._redact)
        except OSError as error:
            self._log(f"{names.HOSTS} could not be written ({error.strerror}).")

    def _dismiss(self) -> None:
        """Dismiss hosts that connected after the requests began, or missed their dismissal."""
        if self._collector is not None and not self._collector.is_busy:
            for node_rank in self._session.connected():
                self._session.to_member(node_rank, Dismissed())
        self._waiting.timer("dismiss", time.monotonic() + _AGAIN_S, self._dismiss)

    def _stay(self) -> None:
        """Stay until this host is dismissed, or the coordinator's host is gone."""
        if not self._session.is_connected:
            self._leave()
            return
        self._waiting.timer("stay", time.monotonic() + _AGAIN_S, self._stay)

    def _leave(self) -> None:
        leave, self._leave_later = self._leave_later, None
        if leave is not None:
            leave()
