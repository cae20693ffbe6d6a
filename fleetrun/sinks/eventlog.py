"""Writes `events.jsonl`, whose content `rundir/eventfile.py` describes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

from fleetrun.run import policy
from fleetrun.run.events import (
    Exited,
    Failure,
    Finished,
    Gathered,
    GatherFailed,
    Happening,
    HostStopped,
    Hung,
    Interrupted,
    JobVerdict,
    Overdue,
    Ready,
    Recovered,
    RootCauses,
    RunWarning,
    SignalAll,
    SourceFailed,
    StacksRequested,
    Started,
    StopRequested,
    StrategyRejected,
    StrategyReport,
    TimerExpired,
    assert_never,
    signal_name,
)
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import eventfile, names
from fleetrun.rundir.eventfile import Value


class EventLog(Sink):
    """Writes each event as a line."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        self._fd = -1

    def open(self, waiting: Waiting) -> None:  # noqa: ARG002 - the protocol's
        """Begin the file with a time before any rank's start."""
        self._fd = self._job.folder.append(names.EVENTS)
        plan = self._job.plan
        self._write(
            self._job.began_at,
            "launched",
            _fields(plan, "job_id", "mode", "engine", "generation", "node_rank")
            | {"processes": len(plan.processes), "launcher_pid": self._job.pid},
        )

    def on_event(self, happening: Happening) -> None:
        """Write the line of HAPPENING; the first plan has none."""
        if not isinstance(happening, Gathered) or happening.attempt:
            at = getattr(happening, "at", None)
            self._write(time.monotonic() if at is None else at, *self._line(happening))

    def close(self) -> None:
        """End the file."""
        os.close(self._fd)

    def _line(self, happening: Happening) -> tuple[str, dict[str, Value]]:  # noqa: C901, PLR0911, PLR0912, RET503 - one case for each kind
        """Return the event name and the fields of HAPPENING's line."""
        match happening:
            case Started():
                logs = map(os.path.basename, self._job.logs(happening))
                files = dict.fromkeys(("log", "error_log")) | dict(
                    zip(("log", "error_log"), logs, strict=False)
                )
                started = {"pid": happening.pid}
                return "started", self._process(happening) | started | files
            case Exited(pid=pid, fault=fault, peak_bytes=peak):
                fields = {
                    "pid": pid,
                    **_status(happening),
                    "fault": fault or None,
                    "peak_bytes": peak,
                }
                return "exited", self._process(happening) | fields
            case Overdue(exited=exited):
                failed = self._names(sorted(exited.also_failed))
                return "overdue", {**self._process(exited), "failed": failed}
            case Interrupted(signum=signum):
                return "interrupted", {"signal": signal_name(signum)}
            case RootCauses(exits=exits):
                first = policy.culprit(exits)
                failed = self._names(exited.process for exited in exits)
                return "root_cause", {
                    **(self._process(first) | _status(first)),
                    "error": first.error or None,
                    "failed_at": policy.failed_at(first),
                    "failed": failed,
                }
            case SignalAll(signum=signum, spared=spared):
                return "signalled", {
                    "signal": signal_name(signum),
                    "spared": self._names(sorted(spared)),
                }
            case TimerExpired():
                return "timer", {}
            case Hung(places=places):
                return "hung", {
                    "seconds": round(happening.seconds, 1),
                    "odd": happening.odd,
                    "places": [{"who": ranks, "where": place} for ranks, place in places],
                    "stacks": happening.stacks,
                    "unreached": happening.unreached,
                    "collectives": [
                        {"who": ranks, "text": text} for ranks, text in happening.collectives
                    ],
                }
            case Ready(process=process, attempt=attempt):
                return "ready", {"process": self._names([process])[0], "attempt": attempt}
            case Gathered():
                return "restarting", _fields(happening, "attempt")
            case GatherFailed():
                return "start_failed", _fields(happening, "attempt", "why")
            case StacksRequested():
                return "stacks_requested", {}
            case RunWarning(what=what, text=text, labels=labels):
                return "warning", {"what": what, "who": labels, "text": text}
            case Recovered():
                text = f"{happening.describe()}."
                fields = _fields(happening, "attempt", "seconds", "why")
                return "recovered", {**fields, "text": text}
            case StrategyReport(silent=silent, ranks_equal=ranks_equal):
                return "strategy_report", {
                    "verdicts": [verdict._asdict() for verdict in happening.verdicts],
                    "silent": silent,
                    "ranks_equal": ranks_equal,
                }
            case StopRequested(is_fenced=True):
                return "fenced", {}
            case StopRequested(attempt=attempt, failure=failure):
                fields = {"attempt": attempt, **_failure(failure), "is_final": False}
                return "peer_failed", fields
            case JobVerdict(attempt=attempt, failure=None, is_here=False):
                return "peers_done", {"attempt": attempt}
            case HostStopped():
                return "host_stopped", _fields(happening, "attempt")
            case JobVerdict(attempt=attempt, failure=failure, is_final=is_final):
                given_up = {"is_final": is_final, "given_up": happening.given_up or None}
                return "job_verdict", {"attempt": attempt, **_failure(failure), **given_up}
            case SourceFailed():
                return "source_failed", _fields(happening, "source", "why", "is_required")
            case StrategyRejected():
                return "strategy_rejected", _fields(happening, "faults")
            case Finished(outcome=outcome):
                return "finished", {
                    "exit_code": outcome.exit_code,
                    "verdict": outcome.describe(),
                    "attempts": outcome.attempts,
                    "given_up": outcome.given_up or None,
                    "stuck": self._names(outcome.stuck),
                }
            case _:  # pragma: no cover - there are no others
                assert_never(happening)

    def _names(self, processes: Iterable[int]) -> list[str]:
        return [self._job.plan.processes[process].name for process in processes]

    def _process(self, event: Started | Exited) -> dict[str, Value]:
        spec = self._job.plan.processes[event.process]
        rank = None if spec.rank is None else spec.rank.rank
        return {"process": spec.name, "rank": rank, "attempt": event.attempt}

    def _write(self, at: float, event: str, more: dict[str, Value]) -> None:
        eventfile.append(self._fd, event, at, more, self._job.redact)


def _status(exited: Exited) -> dict[str, Value]:
    signum = exited.status.signum
    return {
        "code": exited.status.code,
        "signal": None if signum is None else signal_name(signum),
    }


def _fields(value: Any, *keys: str) -> dict[str, Value]:  # noqa: ANN401 - a NamedTuple of any kind
    return {key: getattr(value, key) for key in keys}


def _failure(failure: Failure | None) -> dict[str, Value]:
    return {key: getattr(failure, key, None) for key in ("host", "what", "exit_code")}
