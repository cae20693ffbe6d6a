"""The session with the launchers of the other hosts, while ranks run: one verdict for all."""

from __future__ import annotations

import time

from fleetrun.model import LaunchPlan
from fleetrun.postmortem import investigation
from fleetrun.run.events import (
    Cause,
    Exited,
    Failure,
    Finished,
    Gathered,
    Happening,
    HostStopped,
    Hung,
    Interrupted,
    JobVerdict,
    Overdue,
    SourceFailed,
    StopRequested,
    StrategyRejected,
    signal_name,
)
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Source
from fleetrun.run.policy import FORWARDED, KILL, SESSION, TERM
from fleetrun.session.driver import Session, SessionHandler
from fleetrun.session.messages import DONE, Verdict
from fleetrun.text import counted

# How many characters of a rank's last lines, and of a sentence, other hosts are told.
_MOST_CHARACTERS, _LONGEST = 8000, 2000
# The exit code with which a rank of Paddle's elastic jobs asks for a restart of all ranks.
_START_AGAIN = 101


class JobSession(Source, SessionHandler):
    """Reports what happens here to the other hosts, and feeds the policy with their decisions."""

    name = SESSION
    is_required = True
    has_ranks = True

    def __init__(self, job: ObservedJob, session: Session) -> None:
        self._session = session
        # Before any rank starts.
        assert job.keeper is not None
        session.guard(job.keeper.kill_at)
        self._host = session.host
        self._log, self._redact = job.log, job.redact
        self._attempt = 0
        # Why the session has stopped the ranks here.
        self._stopped_for = ""
        self._take(job.plan)

    def _take(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._owed = {i for i, spec in enumerate(plan.processes) if spec.essential}

    def open(self, waiting: Waiting) -> None:
        """Continue the session that the gathering has begun."""
        super().open(waiting)
        self._session.move(waiting)
        self._session.handler = self
        self._look()

    def on_event(self, happening: Happening) -> None:
        """Report what the other hosts must know."""
        match happening:
            case Gathered(attempt=attempt, plan=plan) if attempt:
                self._attempt = attempt
                self._take(plan)
                self._session.handler = self
                if self._session.config.may_change:
                    hosts = counted(len(plan.nodes), "host")
                    self._log(f"The job goes on with {hosts}; this is host {plan.node_rank}.")
                self._look()
            case Exited(status=status, process=process) if not status.exit_code:
                self._owed.discard(process)
                self._look()
            case Exited() | Overdue() | Hung() | StrategyRejected() | SourceFailed():
                if not isinstance(happening, SourceFailed) or happening.is_required:
                    self._session.failed(self._failure(happening, ""))
            case Interrupted(signum=signum) if signum not in FORWARDED:
                self._session.failed(self._failure(happening, ""))
            case HostStopped(cause=cause, no_retry=no_retry):
                failure = None if isinstance(cause, Failure) else self._failure(cause, no_retry)
                self._session.stopped(failure)
            case Finished(outcome=outcome):
                failed, ends = outcome.cause, "the launcher has ended"
                self._session.quit(None if failed is None else self._failure(failed, ends))

    def _look(self) -> None:
        if not self._owed:
            self._session.report(DONE)

    def is_busy(self) -> bool:
        """Whether the last messages are not delivered yet, for a short time."""
        return self._session.is_busy

    def close(self) -> None:
        """End all connections."""
        self._session.close()

    def _failure(self, cause: Cause | Overdue, no_retry: str) -> Failure:
        """Return CAUSE as the message for the other hosts."""
        words, why, is_victim, is_departure = "", "", False, False
        may_change = self._session.config.may_change
        match cause:
            case Interrupted(signum=signum):
                what, code = f"interrupted by {signal_name(signum)}", 128 + signum
                # A scheduler removes a host by TERM; removing the coordinator's ends the job.
                stays = self._session.serves and not self._session.config.has_store
                is_departure = may_change and signum in {TERM, KILL} and not stays
                no_retry = "" if is_departure else no_retry or what
            case Exited():
                what, code = cause.describe(), cause.status.exit_code
                why = cause.reason() if cause.error else ""
                is_victim = cause.is_victim
                is_departure = may_change and code == _START_AGAIN
                no_retry = no_retry or cause.no_retry or cause.fault
                if not cause.fault:
                    lines, *_ = investigation.last_lines_of(self._plan, cause)
                    words = "\n".join(lines)
            case Overdue(exited=exited):
                return self._failure(exited, no_retry)
            case Hung():
                what, code = cause.describe(), cause.exit_code
            case Failure():
                return cause
            case _:
                what, code = cause.describe(), cause.exit_code
                no_retry = no_retry or what
        return Failure(
            self._host,
            self._redact(what)[:_LONGEST],
            min(max(code, 1), 255),
            self._redact(words)[-_MOST_CHARACTERS:],
            is_victim=is_victim,
            no_retry=self._redact(no_retry)[:_LONGEST],
            is_departure=is_departure,
            is_hang=isinstance(cause, Hung),
            why=self._redact(why)[:_LONGEST],
        )

    def stop(self, failure: Failure) -> None:
        """Stop the ranks."""
        self._stopped_for = failure.what
        self.declare(StopRequested(self._complete(failure), time.monotonic(), self._attempt))

    def stand_by(self) -> None:
        """Do nothing: ranks run here."""

    def conclude(self, verdict: Verdict) -> None:
        """Take the verdict that all hosts get."""
        failure = verdict.failure
        # A failure for which the session stopped the ranks is not theirs.
        is_here = (
            failure is not None
            and verdict.launcher == self._session.launcher
            and failure.what != self._stopped_for
        )
        elsewhere = None if is_here or failure is None else self._complete(failure)
        is_final, given_up, now = verdict.is_final, verdict.given_up, time.monotonic()
        self.declare(JobVerdict(elsewhere, now, self._attempt, is_final, given_up, is_here))

    def _complete(self, failure: Failure) -> Failure:
        return failure._replace(host=failure.host or self._host, exit_code=failure.exit_code or 1)
