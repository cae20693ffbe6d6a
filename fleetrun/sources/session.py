"""The session with the launchers of the other hosts, while ranks run: one verdict for all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fleetrun.run.events import (
    Arbitrate,
    Arbitrated,
    CutOff,
    Exited,
    Finished,
    Gathered,
    Hung,
    Interrupted,
    PeerFailed,
    PeersDone,
    Refuted,
    SourceFailed,
    signal_name,
)
from fleetrun.run.observers import Source
from fleetrun.run.policy import FORWARDED, SESSION, TERM
from fleetrun.session.exchange import ServerEnded
from fleetrun.session.messages import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import Endpoint, LaunchPlan
    from fleetrun.run.events import Cause, Declared, Happening
    from fleetrun.run.loop import Waiting
    from fleetrun.session.driver import GuardLink, Session
    from fleetrun.session.messages import RosterMessage, Verdict
    from fleetrun.sources.session_end import SessionEnd

_REMARK_S = 5.0
# Of the last lines of a rank, so many characters are told to the other hosts.
_MOST_CHARACTERS = 8000
_LONGEST = 2000
# A rank of Paddle's elastic jobs ends with it to have all ranks started again.
_START_AGAIN = 101


class JobSession(Source):
    """Reports what happens here to the other hosts, and feeds the policy with their decisions."""

    name = SESSION
    without = "without contact to the other hosts"
    is_required = True

    def __init__(
        self,
        plan: LaunchPlan,
        session: Session,
        *,
        say: Callable[[str], None],
        hide: Callable[[str], str],
        end: SessionEnd,
        link: GuardLink,
        gone: set[Endpoint],
    ) -> None:
        self._session = session
        # What was said of servers, maybe before the generation is known here.
        self._ended: set[ServerEnded] = set()
        self._gone = gone
        session.hearers[ServerEnded] = self._note_ended
        # Before any rank starts.
        session.guard(link)
        self._end = end
        self._host = session.host
        self._say = say
        self._hide = hide
        self._attempt = 0
        self._take(plan)

    def _take(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._owed = {i for i, spec in enumerate(plan.processes) if spec.essential}
        self._gone.clear()
        for message in self._ended:
            self._forget(message)

    # As a source --------------------------------------------------------------------------------

    def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
        """Go on with the session that the gathering has begun."""
        self._waiting = waiting
        self._declare = declare
        self._session.move(waiting)
        self._session.handler = self
        self._end.open(waiting)
        self._look()

    def on_event(self, happening: Happening) -> None:
        """Report what the other hosts must know."""
        match happening:
            case Gathered(attempt=attempt, plan=plan) if attempt:
                self._attempt = attempt
                self._take(plan)
                self._end.take(plan, attempt)
                self._session.handler = self
                if self._session.terms.may_change:
                    hosts = f"{len(plan.nodes)} host{'s' * (len(plan.nodes) != 1)}"
                    self._say(f"The job goes on with {hosts}; this is host {plan.node_rank}.")
                self._look()
            case Exited(status=status, process=process) if not status.exit_code:
                self._owed.discard(process)
                self._look()
                spec = self._plan.processes[process]
                if not spec.essential and spec.rank is not None:
                    # Trainers of other hosts may be waiting for it.
                    place = self._plan.ranks.index(spec.rank)
                    self._session.to_coordinator(ServerEnded(self._plan.generation, place))
            case Exited() | Hung() | Refuted() | SourceFailed():
                if not isinstance(happening, SourceFailed) or happening.is_required:
                    self._session.failed(self._failure(happening, ""))
            case Interrupted(signum=signum) if signum not in FORWARDED:
                self._session.failed(self._failure(happening, ""))
            case Arbitrate(cause=cause, no_retry=no_retry):
                known = None if isinstance(cause, PeerFailed) else self._failure(cause, no_retry)
                self._session.stopped(known)
            case Finished(outcome=outcome):
                last = outcome.cause
                left = None if last is None else self._failure(last, "the launcher has ended")
                self._end.finish(left)
            case _:
                pass

    def _look(self) -> None:
        """Print that this host's trainers are done, if it waits for others."""
        if not self._owed:
            self._session.done()
            if self._plan.processes:
                self._waiting.alarm("remark", time.monotonic() + _REMARK_S, self._remark)

    def _remark(self) -> None:
        if not self._owed and not self._is_over:
            self._say("This host's trainers are done; waiting for those of the other hosts.")

    _is_over = False
    _stopped_for = ""

    def is_busy(self) -> bool:
        """Whether the last messages are not delivered yet, for a short time."""
        return self._end.is_busy or self._session.is_busy

    def close(self) -> None:
        """End all connections."""
        self._end.close()
        self._session.close()

    def _note_ended(self, _: int, message: ServerEnded) -> None:
        """Take note that a server of some host has ended, and pass it on."""
        self._ended.add(message)
        self._forget(message)
        for node_rank in self._session.connected():
            self._session.to_member(node_rank, message)

    def _forget(self, ended: ServerEnded) -> None:
        """Let nobody here wait for a server that has ENDED."""
        ranks = self._plan.ranks
        if ended.generation == self._plan.generation and 0 <= ended.process < len(ranks):
            self._gone.add(ranks[ended.process].endpoint)

    # What goes out ------------------------------------------------------------------------------

    def _failure(self, cause: Cause, no_retry: str) -> Failure:
        """Return CAUSE as the message for the other hosts."""
        words, is_victim, is_departure = "", False, False
        may_change = self._session.terms.may_change
        match cause:
            case Interrupted(signum=signum):
                what = f"interrupted by {signal_name(signum)}"
                code = 128 + signum
                # Schedulers take a host away by TERM, and the coordinator's takes the job along.
                stays = self._session.serves and not self._session.may_hand_over
                is_departure = may_change and signum == TERM and not stays
                no_retry = "" if is_departure else no_retry or what
            case Exited():
                what, code = cause.describe(), cause.status.exit_code
                is_victim = cause.is_victim
                is_departure = may_change and code == _START_AGAIN
                no_retry = no_retry or cause.no_retry or cause.fault
                words = self._last_lines(cause) if not cause.fault else ""
            case Hung(places=places):
                what, code = cause.describe(), cause.exit_code
                if cause.odd and places:
                    what += f": {' and '.join(places[0][0])} in {places[0][1]}"
            case PeerFailed():
                return Failure(cause.host, cause.what[:_LONGEST], cause.exit_code)
            case _:
                what, code = cause.describe(), cause.exit_code
                no_retry = no_retry or what
        return Failure(
            self._host,
            self._hide(what)[:_LONGEST],
            min(max(code, 1), 255),
            self._hide(words)[-_MOST_CHARACTERS:],
            is_victim=is_victim,
            no_retry=self._hide(no_retry)[:_LONGEST],
            is_departure=is_departure,
        )

    def _last_lines(self, exited: Exited) -> str:
        from fleetrun.postmortem import investigation  # only after a failure

        words, *_ = investigation.last_lines_of(self._plan, exited)
        return "\n".join(words)

    # What comes in ------------------------------------------------------------------------------

    def obey(self) -> None:
        """Go by what the plan has of the terms."""

    def plan(self, roster: RosterMessage) -> None:
        """Plan nothing: generations are planned by the gathering."""

    def run(self) -> None:
        """Start nothing: that is for the gathering, too."""

    def stop(self, failure: Failure) -> None:
        """Stop, as the others do."""
        self._stopped_for = failure.what
        self._declare(self._peer_failed(failure))

    def stand_by(self) -> None:
        """Wait for nothing: ranks run here."""

    def kill(self) -> None:
        """Kill the ranks: the other hosts may restart without them."""
        self._say("Cut off from the other hosts: the ranks here are killed.")
        self._declare(CutOff(time.monotonic()))

    def conclude(self, verdict: Verdict) -> None:
        """Take the verdict that all hosts get."""
        now, failure = time.monotonic(), verdict.failure
        if failure is None:
            self._is_over = True
            self._declare(PeersDone(now, self._attempt))
            return
        # What the session has stopped the ranks for does not come from them.
        is_ours = verdict.launcher == self._session.launcher and failure.what != self._stopped_for
        peer = None if is_ours else self._peer_failed(failure, is_final=verdict.is_final)
        self._declare(Arbitrated(self._attempt, peer, now, verdict.is_final, verdict.given_up))

    def _peer_failed(self, failure: Failure, *, is_final: bool = False) -> PeerFailed:
        return PeerFailed(
            failure.host or self._host,
            failure.what,
            failure.exit_code or 1,
            time.monotonic(),
            self._attempt,
            is_final,
            failure.words,
            failure.is_departure,
        )
