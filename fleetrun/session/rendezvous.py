"""The rendezvous of a job on several hosts: joins the session, and plans by its roster."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from fleetrun.errors import (
    EnvironmentFault,
    FleetrunError,
    RendezvousError,
    StrangerFault,
    UsageError,
)
from fleetrun.model import LaunchPlan
from fleetrun.run.events import Failure
from fleetrun.run.gathering import Answer, Gathering
from fleetrun.run.isolation import CallResult, IsolatedCall
from fleetrun.run.loop import Waiting
from fleetrun.session.config import PREPARE_S
from fleetrun.session.driver import Session, SessionHandler
from fleetrun.session.messages import JoinRequest, RosterMessage, Verdict
from fleetrun.text import sentence


class Settled(Protocol):
    """Called when the first rendezvous is over."""

    def __call__(self, *, has_begun: bool) -> None:
        """HAS_BEGUN: the job begins; otherwise there will be none."""


# The coordinator reports first, as it knows which hosts are missing.
_LATER_S, _LAST_S = 0.5, 1.0
_FOR_EVER_S = 1e9
# Drivers and network folders that are slower than this do not work.
HEALTH_S = 20.0
# Importing Paddle from a cold network folder takes minutes.
_IMPORT_S = 600.0
# How long a host that cannot take part waits to tell the others, which may start seconds later; the
# user is told earlier.
_REPORT_S, _LOOK_S, _SAY_S = 10.0, 0.05, 1.0


class Rendezvous(Gathering, SessionHandler):
    """Plans each generation together with the other hosts.

    OFFER returns this host's request for an attempt, PLAN the plan for a roster. If OFFER fails,
    the host joins with BARE to report why. REDACT masks secrets. SETTLED is called at the end of
    the first rendezvous. HEALTH checks this host before each later one, and before the first one if
    it has stood by; WARM then checks that Paddle can be imported. These two run in child processes
    and return what is wrong. HINT says why hosts may never come.
    """

    is_shared = True
    # The coordinator's host sets how long the session waits.
    timeout_s = _FOR_EVER_S

    def __init__(
        self,
        session: Session,
        *,
        offer: Callable[[int], JoinRequest],
        bare: JoinRequest,
        plan: Callable[[RosterMessage], LaunchPlan],
        redact: Callable[[str], str],
        log: Callable[[str], None],
        settled: Settled | None = None,
        health: Callable[[], str] | None = None,
        warm: Callable[[], str] | None = None,
        hint: str = "",
    ) -> None:
        self._session = session
        self._offer = offer
        self._bare = bare
        self._make = plan
        self._redact = redact
        self._log = log
        self._settled = settled
        self._health = health
        self._warm = warm
        self._hint = f" {hint}" if hint else ""
        self._call: IsolatedCall | None = None
        # Why Paddle cannot be imported, and the trouble that the others were told.
        self._cold = self._told_trouble = ""
        self._has_stood_by = False
        self._attempt = 0
        self._fault: FleetrunError | None = None
        # Whether it has joined only to report the fault.
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
        self._fault, self._planned, self._is_over = None, None, False
        self._session.attend(self)
        if not attempt:
            self._session.open(waiting)
        self._begin_again()

    def _begin_again(self) -> None:
        """Join a generation, and wait for the other hosts."""
        config, attempt = self._session.config, self._attempt
        if attempt and config.may_change:
            # As long as the coordinator waits for others, and a little more; a lost one's lease has
            # to end first.
            longest_s = config.elastic_timeout_s + 3 * config.heartbeat_timeout_s + _LAST_S
            self._wait(max(config.rdzv_timeout_s, longest_s))
        else:
            self._wait(config.rdzv_timeout_s)
        self._look_at_host()

    def _look_at_host(self) -> None:
        """Join, after a check of this host if that matters."""
        attempt = self._attempt
        if self._health is not None and self.may_change and (attempt or self._has_stood_by):
            self._ask(self._health, self._join)
        else:
            self._join("")

    def _ask(
        self,
        question: Callable[[], str],
        answered_with: Callable[[str], None],
        callee: str = "its GPUs or its disk",
        within_s: float = HEALTH_S,
    ) -> None:
        """Ask QUESTION; call ANSWERED_WITH with what is wrong with this host, or with nothing."""
        self._abandon()
        try:
            call = self._call = IsolatedCall(question)
        except OSError as error:
            answered_with(f"it can start no process ({error.strerror})")
            return

        def answered(answer: CallResult) -> None:
            self._call = None
            answered_with(answer.trouble or str(answer.value))

        call.watch(self._waiting, answered, within_s, callee=callee)

    def _abandon(self) -> None:
        """Abandon the current check."""
        call, self._call = self._call, None
        if call is not None:
            call.abandon()

    def _join(self, trouble: str) -> None:
        """Join the generation; TROUBLE is why this host should stay out."""
        trouble = self._told_trouble = trouble or self._cold
        try:
            offer = self._offer(self._attempt)
        except FleetrunError as error:
            # Report it, so that the others do not wait for this host.
            self._tell(error)
        else:
            self._session.join(offer._replace(trouble=self._redact(trouble)[:_LONGEST]))

    def _tell(self, fault: FleetrunError) -> None:
        """Join to report that this host cannot take part because of FAULT."""
        self._fault = fault
        self._tell_late(fault)
        self._session.join(self._bare, self._failure(fault))

    def _tell_late(self, fault: FleetrunError) -> None:
        """Tell hosts that join later that the job cannot start because of FAULT."""
        self._is_telling = True
        now = time.monotonic()
        if isinstance(fault, StrangerFault):
            # Nobody waits for it, unless it is listed with an address that it does not know.
            self._report(fault, now + _SAY_S)
            return
        self._waiting.timer("say", now + _SAY_S, self._say_fault)
        self._report(fault, now + _REPORT_S)

    def _say_fault(self) -> None:
        """Say that the others are still being told; what is wrong follows."""
        if not self._is_over:
            seconds = _REPORT_S - _SAY_S
            self._log(
                "This host cannot take part, for a reason that follows. Telling the other hosts, "
                f"for up to {seconds:g} s more."
            )

    def _wait(self, seconds: float) -> None:
        """Give up after SECONDS."""
        self._until = time.monotonic() + seconds
        self._waiting.timer("unanswered", self._until, self._unanswered)

    def progress(self, left_s: float) -> str:
        """Return a line about who is awaited, and for how long."""
        if self._until is None or self._is_telling:
            return ""
        option, until = self._session.limit() or ("", self._until)
        left_s = max(0.0, min(until, self._until) - time.monotonic())
        by = f" ({option})" if option else ""
        return f"Waiting up to {left_s:.0f} s{by} for {self.missing()}.{self._hint}"

    def _report(self, fault: FleetrunError, until: float) -> None:
        """End with FAULT once all hosts have heard it, or at UNTIL; see conclude."""
        now = time.monotonic()
        if self._session.has_told_all or now >= until:
            self._refuse(fault)
        else:
            self._waiting.timer("report", now + _LOOK_S, partial(self._report, fault, until))

    def missing(self) -> str:
        """Return what is awaited."""
        return self._session.missing()

    def cancel(self) -> None:
        """Leave the session."""
        if self._is_over:
            return
        self._is_over = True
        self._abandon()
        self.withdraw()
        self._settle(has_begun=False)
        host = self._bare.named()
        # An elastic job that has begun goes on without this host.
        is_departure = self.may_change and self._attempt > 0
        self._session.quit(Failure(host, "interrupted", _INTERRUPTED, is_departure=is_departure))
        if not self._attempt:
            self._session.flush()

    def _reply(self, planned: LaunchPlan | FleetrunError) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._abandon()
        # From the loop, as the caller takes an answer only there.
        self._waiting.timer("unanswered", None, self._unanswered)
        self._waiting.timer("answer", time.monotonic(), lambda: self._answer(planned))

    def _unanswered(self) -> None:
        """Give up: at once without a coordinator, otherwise if it stays silent."""
        if self._fault is not None:
            self._refuse(self._fault)
            return
        waited = f"{self._session.config.rdzv_timeout_s:g} s"
        if not self._session.is_connected:
            self._refuse(
                RendezvousError(
                    sentence(f"{self.missing()} did not answer within {waited}.{self._hint}")
                )
            )
            return

        def give_up() -> None:
            self._refuse(
                RendezvousError(
                    sentence(f"{self.missing()} did not come within {waited}.{self._hint}")
                )
            )

        self._waiting.timer("unanswered", time.monotonic() + _LATER_S, give_up)

    def _settle(self, *, has_begun: bool) -> None:
        if self._settled is not None and not self._attempt:
            self._settled(has_begun=has_begun)

    def _refuse(self, error: FleetrunError) -> None:
        self.withdraw()
        self._settle(has_begun=False)
        failure = self._failure(error)
        if isinstance(error, RendezvousError):
            failure = failure._replace(host="")
        # An elastic job goes on without a host that cannot take part.
        is_departure = error is self._fault and self.may_change
        self._session.quit(failure._replace(is_departure=is_departure))

        def reply() -> None:
            if not self._attempt and not self._is_over:
                self._session.flush()
            self._reply(error)

        # Not from within the session, which still has to send that.
        self._waiting.timer("unanswered", time.monotonic(), reply)

    # For the session ------------------------------------------------------------------------------

    def obey(self) -> None:
        """Wait as long as the coordinator does."""
        if self._until is not None and not self._attempt:
            self._wait(self._session.config.rdzv_timeout_s)

    def plan(self, roster: RosterMessage) -> None:
        """Plan for ROSTER, and report whether that is possible."""
        has_stood_by = self._until is None
        self._wait(PREPARE_S + _LATER_S)
        if has_stood_by and self._health is not None and not self._told_trouble:
            # Much may have gone wrong here since this host joined.
            self._ask(self._health, partial(self._plan_if_well, roster))
        else:
            self._plan(roster)

    def _plan_if_well(self, roster: RosterMessage, trouble: str) -> None:
        """Plan, or let the others go on without this host because of TROUBLE."""
        trouble = trouble or self._cold
        if not trouble:
            self._plan(roster)
            return
        reason = f"it was a spare, and {self._redact(trouble)}"[:_LONGEST]
        host = self._bare.named()
        self._session.planned(Failure(host, reason, RendezvousError.exit_code, is_departure=True))

    def _plan(self, roster: RosterMessage) -> None:
        fault = self._fault
        if fault is None:
            try:
                self._planned = self._make(roster)
                # If it cannot start here, it must not start anywhere.
                self.prepare(self._planned, self._attempt)
            except FleetrunError as error:
                fault = error
        if fault is None:
            self._session.planned(None)
            return
        self._fault = fault
        failure = self._failure(fault)
        # An elastic job goes on without this host, which ends when the others have stopped.
        is_departure = self.may_change and not self._session.serves
        no_retry = "" if is_departure else failure.what
        self._session.planned(failure._replace(is_departure=is_departure, no_retry=no_retry))

    def _failure(self, fault: FleetrunError) -> Failure:
        what = self._redact(str(fault))[:_LONGEST].rstrip(".")
        return Failure(self._bare.named(), what, fault.exit_code)

    def run(self) -> None:
        """Answer with the plan: all hosts are ready."""
        assert self._planned is not None
        self._settle(has_begun=True)
        self._reply(self._planned)

    def stand_by(self) -> None:
        """Wait while the job runs."""
        self._until = None
        self._waiting.timer("unanswered", None, self._unanswered)
        self._log(f"This host waits for {self.missing()}.")
        if self._warm is not None and not self._has_stood_by:
            self._ask(self._warm, self._warmed, "the import of Paddle", _IMPORT_S)
        self._has_stood_by = True

    def _warmed(self, trouble: str) -> None:
        """Remember that Paddle cannot be imported, if it cannot."""
        self._cold = trouble
        if trouble:
            self._log(f"This host would stay out of the job, as {trouble}.")

    def conclude(self, verdict: Verdict) -> None:
        """Answer that there is no plan, or join the next generation."""
        if self._is_telling and self._session.serves:
            # See _report: the others have yet to come.
            return
        if not verdict.is_final and self._fault is None and not self._is_over:
            # A host was lost before anything ran, so this attempt goes on.
            if verdict.failure is not None:
                self._session.shown(f"{verdict.failure.host} stays out: {verdict.failure.what}")
            self._planned = None
            self.withdraw()
            self._begin_again()
            return
        failure = verdict.failure
        reason = "the job is done" if failure is None else failure.what
        where = f" (on {failure.host})" if failure is not None and failure.host else ""
        error = self._fault
        is_ours = verdict.launcher in ("", self._session.launcher)
        if error is None or (verdict.is_final and not is_ours):
            is_missing = failure is not None and failure.exit_code == RendezvousError.exit_code
            hint = self._hint if is_missing and not self._attempt else ""
            error = RendezvousError(sentence(f"{reason}{where}.{hint}"))
            if failure is not None:
                error.exit_code = failure.exit_code
            elif self._until is None:
                # The job did not need this host; otherwise it came too late.
                error.exit_code = 0
        if self._session.serves and not self._attempt and error.exit_code in _EARLY:
            # A host that starts a moment later would find nobody and wait for --rdzv_timeout.
            self._tell_late(error)
        else:
            self._refuse(error)


# The exit code of shells for SIGTERM.
_INTERRUPTED = 143
# The exit codes of jobs that a host cannot start or has left before the start.
_EARLY = (UsageError.exit_code, EnvironmentFault.exit_code, _INTERRUPTED)


# The most of a failure's text; a list of all hosts may be longer than a message allows.
_LONGEST = 8000
