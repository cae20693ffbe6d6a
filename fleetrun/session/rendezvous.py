"""The rendezvous of a job on several hosts: joins the session, and plans by its roster."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from fleetrun.errors import FleetrunError, RendezvousError, StrangerFault
from fleetrun.model import LaunchPlan
from fleetrun.plan import hosts
from fleetrun.run.events import Failure
from fleetrun.run.gathering import Answer, Gathering
from fleetrun.run.loop import Waiting, nothing
from fleetrun.session.driver import Session, SessionHandler
from fleetrun.session.local_host import LocalHost
from fleetrun.session.messages import READY, RosterMessage, Verdict
from fleetrun.text import sentence

# How long a host that cannot take part waits to tell the others, which may start seconds later; one
# that no host waits for, a moment.
_REPORT_S, _STRANGER_S, _LOOK_S = 10.0, 1.0, 0.05
# The exit code of shells for SIGTERM.
_INTERRUPTED = 143
# The most of a failure's text; a list of all hosts may be longer than a message allows.
_LONGEST = 8000


class Rendezvous(Gathering, SessionHandler):
    """Plans each generation together with the other hosts, by OWN host. REDACT masks secrets."""

    is_shared = True

    def __init__(
        self,
        session: Session,
        own: LocalHost,
        *,
        redact: Callable[[str], str],
        log: Callable[[str], None],
    ) -> None:
        self._session, self._own = session, own
        self._redact, self._log = redact, log
        self._attempt = 0
        # Why this host cannot take part, and whether it is there only to say so.
        self._fault: FleetrunError | None = None
        self._is_telling = False
        self._planned: LaunchPlan | None = None
        self._is_over = True
        # Until when it waits; None: it stands by.
        self._until: float | None = None

    @property
    def may_change(self) -> bool:
        """Whether hosts may come and go while the job runs."""
        return self._session.config.may_change

    def begin(self, attempt: int, waiting: Waiting, answer: Answer) -> None:
        """Join the generation."""
        self._attempt, self._waiting, self._answer = attempt, waiting, answer
        self._fault, self._is_over = None, False
        self._session.handler = self
        if not attempt:
            self._session.open(waiting)
        self._join_next()

    def _join_next(self) -> None:
        """Join a generation."""
        self._until = None
        self.look_again()
        try:
            offer = self._own.offer(self._attempt)
        except FleetrunError as error:
            # Report it, so that the others do not wait for this host.
            self._fault = error
            self._tell(error)
            self._session.join(self._own.bare, self._failure(error))
        else:
            self._session.join(offer)

    def _wait(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._waiting.timer("unanswered", self._until, self._unanswered)

    def _unanswered(self) -> None:
        waited_s = self._session.config.rdzv_timeout_s
        if self._session.link is not None:
            self._wait(waited_s)
        else:
            what = f"{self._session.missing()} did not answer within {waited_s:g} s."
            self._refuse(self._fault or RendezvousError(sentence(what)))

    def progress(self) -> str:
        """Return a line about who is awaited, and for how long."""
        if self._until is None:
            return ""
        left_s = max(0.0, self._until - time.monotonic())
        return f"Waiting up to {left_s:.0f} s for {self._session.missing()}."

    # For the session ------------------------------------------------------------------------------

    def stand_by(self) -> None:
        """Wait while the job runs."""
        self._until = None
        self._waiting.timer("unanswered", None, nothing)
        self._log(f"This host waits for {self._session.missing()}.")

    def look_again(self) -> None:
        """Give up after a time if no coordinator says how long to wait."""
        if self._until is None:
            # The lease of a lost coordinator has to end first.
            lease_s = 3 * self._session.config.heartbeat_timeout_s if self._attempt else 0.0
            self._wait(self._session.config.rdzv_timeout_s + lease_s)

    def plan(self, roster: RosterMessage) -> None:
        """Plan for ROSTER, and report whether that is possible."""
        try:
            if self._fault is not None:
                raise self._fault
            self._planned = self._own.plan(roster)
            # If it cannot start here, it must not start anywhere.
            self.prepare(self._planned, self._attempt)
        except FleetrunError as error:
            self._fault = error
            failure = self._failure(error)
            # An elastic job goes on without this host, which ends when the others have stopped.
            is_departure = self.may_change and not self._session.serves
            no_retry = "" if is_departure else failure.what
            self._session.stopped(failure._replace(is_departure=is_departure, no_retry=no_retry))
        else:
            self._session.report(READY)

    def run(self) -> None:
        """Answer with the plan: all hosts are ready."""
        assert self._planned is not None
        self._own.settle(has_begun=True)
        self._reply(self._planned)

    def conclude(self, verdict: Verdict) -> None:
        """Answer that there is no plan, or join the next generation."""
        if self._is_telling and self._session.serves:
            # The others have yet to come.
            return
        error = self._fault
        if not verdict.is_final and error is None and not self._is_over:
            # A host was lost before anything ran, so this attempt goes on.
            if (lost := verdict.failure) is not None:
                self._session.shown(f"{lost.host} stays out: {lost.what}")
            self.withdraw()
            self._join_next()
            return
        is_ours = verdict.launcher in ("", self._session.launcher)
        if error is None or (verdict.is_final and not is_ours):
            error = self._error_of(verdict.failure)
        # The coordinator stays for a host that starts a moment later and would find nobody.
        if self._session.serves and not self._attempt and verdict.launcher:
            self._tell(error)
        else:
            self._refuse(error)

    def _error_of(self, failure: Failure | None) -> RendezvousError:
        """Return the error for a job that has ended with FAILURE before it ran here."""
        if failure is None:
            error = RendezvousError("The job is done.")
            # Either the job did not need this host, or this came too late.
            error.exit_code = 0 if self._until is None else error.exit_code
        else:
            where = f" (on {failure.host})" if failure.host else ""
            error = RendezvousError(sentence(f"{failure.what}{where}."))
            error.exit_code = failure.exit_code
        return error

    # The end --------------------------------------------------------------------------------------

    def _tell(self, fault: FleetrunError) -> None:
        """End with FAULT once all hosts have heard it, also those that join later."""
        now = time.monotonic()
        if not self._is_telling:
            self._is_telling = True
            # Nobody waits for a stranger, unless it is listed with an address that it lacks.
            self._until = now + (_STRANGER_S if isinstance(fault, StrangerFault) else _REPORT_S)
        if self._session.has_told_all or now >= (self._until or now):
            self._refuse(fault)
        else:
            self._waiting.timer("unanswered", now + _LOOK_S, partial(self._tell, fault))

    def cancel(self) -> None:
        """Leave the session."""
        if self._is_over:
            return
        self._is_over = True
        failure = Failure(self._own.bare.named(), "interrupted", _INTERRUPTED)
        # An elastic job that has begun goes on without this host.
        self._quit(failure, is_departure=self.may_change and self._attempt > 0)
        if not self._attempt:
            self._session.flush()

    def _refuse(self, error: FleetrunError) -> None:
        failure = self._failure(error)
        if isinstance(error, RendezvousError):
            failure = failure._replace(host="")
        # An elastic job goes on without a host that cannot take part.
        self._quit(failure, is_departure=error is self._fault and self.may_change)
        self._reply(error)

    def _quit(self, failure: Failure, *, is_departure: bool) -> None:
        self.withdraw()
        self._own.settle(has_begun=self._attempt > 0)
        self._session.quit(failure._replace(is_departure=is_departure))

    def _reply(self, planned: LaunchPlan | FleetrunError) -> None:
        """Answer from the loop: not from within the session, which still has to send."""
        if not self._is_over:
            self._is_over = True
            self._waiting.timer("unanswered", time.monotonic(), partial(self._reply_now, planned))

    def _reply_now(self, planned: LaunchPlan | FleetrunError) -> None:
        if isinstance(planned, FleetrunError) and not self._attempt:
            self._session.flush()
        self._answer(planned)

    def _failure(self, fault: FleetrunError) -> Failure:
        what = self._redact(str(fault))[:_LONGEST].rstrip(".")
        return Failure(self._own.bare.named(), what, fault.exit_code)


def join(
    own: LocalHost, *, log: Callable[[str], None], redact: Callable[[str], str]
) -> tuple[Session, Rendezvous]:
    """Return the session of the job of OWN host, and the gathering that joins it.

    REDACT masks secrets in what the other hosts are told.
    """
    elect = None
    members = () if own.engine.hosts else hosts.store_endpoints(own.request.master or "")
    if members:
        from fleetrun.session.election import Election  # only with etcd

        reached = hosts.reached_at(own.facts.addresses)
        is_far = reached and not all(hosts.is_loopback(point.host) for point in members)
        elect = partial(Election, members=members, own_address=reached[0].ip if is_far else "")
    endpoint, name = own.endpoint(has_store=elect is not None), own.bare.named()
    session = Session(endpoint, own.launcher, host=name, log=log, elect=elect)
    return session, Rendezvous(session, own, redact=redact, log=log)
