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
    signal_name,
)
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import eventfile, names
from fleetrun.rundir.eventfile import Value

# The names and fields of events that are written as they are.
_PLAIN: dict[type[Happening], tuple[str, tuple[str, ...]]] = {
    Gathered: ("restarting", ("attempt",)),
    GatherFailed: ("start_failed", ("attempt", "why")),
    HostStopped: ("host_stopped", ("attempt",)),
    SourceFailed: ("source_failed", ("source", "why", "is_required")),
    StacksRequested: ("stacks_requested", ()),
    StrategyRejected: ("strategy_rejected", ("faults",)),
    TimerExpired: ("timer", ()),
}


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

    def _line(self, happening: Happening) -> tuple[str, dict[str, Value]]:  # noqa: C901, PLR0911, PLR0912 - one case for each kind
        """Return the event name and the fields of HAPPENING's line."""
        fields: dict[str, Value]
        match happening:
            case Started():
                files = (*map(os.path.basename, self._job.logs(happening)), None)
                fields = {"pid": happening.pid, "log": files[0], "error_log": files[1]}
                return "started", self._process(happening) | fields
            case Exited(fault=fault):
                fields = _fields(happening, "pid", "peak_bytes") | {"fault": fault or None}
                return "exited", self._process(happening) | _status(happening) | fields
            case Overdue(exited=exited):
                failed = self._names(sorted(exited.also_failed))
                return "overdue", {**self._process(exited), "failed": failed}
            case RootCauses(exits=exits):
                first = policy.culprit(exits)
                fields = {"error": first.error or None, "failed_at": policy.failed_at(first)}
                failed = self._names(exited.process for exited in exits)
                return "root_cause", {
                    **(self._process(first) | _status(first) | fields),
                    "failed": failed,
                }
            case Interrupted(signum=signum):
                return "interrupted", {"signal": signal_name(signum)}
            case SignalAll(signum=signum):
                return "signalled", {"signal": signal_name(signum)}
            case Hung(places=places, collectives=collectives):
                return "hung", _fields(happening, "odd", "stacks") | {
                    "seconds": round(happening.seconds, 1),
                    "places": [{"who": ranks, "where": place} for ranks, place in places],
                    "collectives": [{"who": ranks, "text": text} for ranks, text in collectives],
                }
            case RunWarning(labels=labels):
                return "warning", _fields(happening, "what", "text") | {"who": labels}
            case Recovered():
                fields = _fields(happening, "attempt", "seconds", "why")
                return "recovered", fields | {"text": f"{happening.describe()}."}
            case StrategyReport(verdicts=verdicts):
                fields = _fields(happening, "silent", "ranks_equal")
                return "strategy_report", fields | {"verdicts": [v._asdict() for v in verdicts]}
            case StopRequested(attempt=attempt, failure=failure):
                fields = {"attempt": attempt, "is_final": False}
                return "peer_failed", _failure(failure) | fields
            case JobVerdict(attempt=attempt, failure=None, is_here=False):
                return "peers_done", {"attempt": attempt}
            case JobVerdict(failure=failure):
                fields = {"given_up": happening.given_up or None}
                return "job_verdict", (
                    _fields(happening, "attempt", "is_final") | _failure(failure) | fields
                )
            case Finished(outcome=outcome):
                return "finished", _fields(outcome, "exit_code", "attempts") | {
                    "verdict": outcome.describe(),
                    "given_up": outcome.given_up or None,
                    "stuck": self._names(outcome.stuck),
                }
            case _:
                name, keys = _PLAIN[type(happening)]
                return name, _fields(happening, *keys)

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
    name = None if signum is None else signal_name(signum)
    return {"code": exited.status.code, "signal": name}


def _fields(value: Any, *keys: str) -> dict[str, Value]:  # noqa: ANN401 - a NamedTuple of any kind
    return {key: getattr(value, key) for key in keys}


def _failure(failure: Failure | None) -> dict[str, Value]:
    return {key: getattr(failure, key, None) for key in ("host", "what", "exit_code")}
