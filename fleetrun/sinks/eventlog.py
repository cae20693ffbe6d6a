"""Writes `events.jsonl`, what happened; `records/eventfile.py` says what is in it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from fleetrun.records import eventfile, names
from fleetrun.records.folder import Folder
from fleetrun.run import policy
from fleetrun.run.events import (
    Elapsed,
    Examined,
    Exited,
    Finished,
    Gathered,
    GatherFailed,
    HostStopped,
    Hung,
    Interrupted,
    JobVerdict,
    Judged,
    Noticed,
    Ready,
    Refuted,
    SignalAll,
    SourceFailed,
    StacksWanted,
    Started,
    StopRequested,
    assert_never,
    signal_name,
)
from fleetrun.run.observers import Sink

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import LaunchPlan
    from fleetrun.records.eventfile import Value
    from fleetrun.run.events import Happening
    from fleetrun.run.loop import Waiting


class EventLog(Sink):
    """Writes each event as a line."""

    def __init__(
        self,
        plan: LaunchPlan,
        folder: Folder | None = None,
        hide: Callable[[str], str] = str,
    ) -> None:
        self._plan = plan
        self._hide = hide
        self._folder = folder or Folder(os.path.join(plan.cwd, plan.run_dir))
        self._fd = -1
        # Before any rank starts; the file is begun while they do.
        self._launched_at = time.monotonic()

    def open(self, waiting: Waiting) -> None:  # noqa: ARG002 - the protocol's
        """Begin the file."""
        self._fd = self._folder.append(names.EVENTS)
        plan = self._plan
        self._write(
            "launched",
            self._launched_at,
            job_id=plan.job_id,
            mode=plan.mode,
            engine=plan.engine,
            generation=plan.generation,
            node_rank=plan.node_rank,
            processes=len(plan.processes),
            launcher_pid=os.getpid(),
        )

    def on_event(self, happening: Happening) -> None:  # noqa: C901, PLR0912, PLR0915 - one case for each kind
        """Write the line of HAPPENING."""
        match happening:
            case Started(pid=pid, at=at):
                spec = self._plan.processes[happening.process]
                log, *more = names.log_paths(self._plan, spec, happening.attempt)
                self._write(
                    "started",
                    at,
                    **self._process(happening),
                    pid=pid,
                    log=os.path.basename(log),
                    error_log=os.path.basename(more[0]) if more else None,
                )
            case Exited(status=status, at=at, pid=pid, fault=fault):
                signum = status.signum
                self._write(
                    "exited",
                    at,
                    **self._process(happening),
                    pid=pid,
                    code=status.code,
                    signal=None if signum is None else signal_name(signum),
                    fault=fault or None,
                    peak_bytes=happening.peak_bytes,
                )
            case Interrupted(signum=signum, at=at):
                self._write("interrupted", at, signal=signal_name(signum))
            case Examined(exits=exits, at=at):
                first = policy.culprit(exits)
                signum = first.status.signum
                self._write(
                    "root_cause",
                    at,
                    **self._process(first),
                    code=first.status.code,
                    signal=None if signum is None else signal_name(signum),
                    failed_at=first.at if first.failed_at is None else first.failed_at,
                    failed=[self._plan.processes[one.process].name for one in exits],
                )
            case SignalAll(signum=signum, spared=spared):
                self._write(
                    "signalled",
                    time.monotonic(),
                    signal=signal_name(signum),
                    spared=[self._plan.processes[one].name for one in sorted(spared)],
                )
            case Elapsed(at=at):
                self._write("timer", at)
            case Hung(at=at, seconds=seconds, stacks=stacks):
                self._write(
                    "hung",
                    at,
                    seconds=round(seconds, 1),
                    odd=list(happening.odd),
                    places=[{"who": list(who), "where": place} for who, place in happening.places],
                    stacks=stacks,
                    deadlocked=[
                        {"child_of": who, "pid": pid, "where": place}
                        for who, pid, place in happening.deadlocked
                    ],
                    unreached=list(happening.unreached),
                )
            case Ready(process=process, at=at, attempt=attempt):
                name = self._plan.processes[process].name
                self._write("ready", at, process=name, attempt=attempt)
            case Gathered(attempt=attempt, at=at, plan=plan):
                self._plan = plan
                if attempt:
                    self._write("restarting", at, attempt=attempt)
            case GatherFailed(attempt=attempt, at=at, why=why):
                self._write("start_failed", at, attempt=attempt, why=why)
            case StacksWanted(at=at):
                self._write("stacks_requested", at)
            case Noticed(what=what, at=at, text=text, labels=labels):
                self._write("warning", at, what=what, who=list(labels), text=text)
            case Judged(at=at, silent=silent, ranks_equal=ranks_equal):
                reported = [
                    {
                        "who": list(one.labels),
                        "name": one.name,
                        "asked": one.asked,
                        "in_effect": one.in_effect,
                        "status": one.status,
                        "why": one.why,
                    }
                    for one in happening.verdicts
                ]
                self._write(
                    "strategy_report",
                    at,
                    verdicts=reported,
                    silent=list(silent),
                    ranks_equal=ranks_equal,
                )
            case StopRequested(at=at, is_fenced=True):
                self._write("fenced", at)
            case StopRequested(at=at, attempt=attempt, failure=failure):
                self._write(
                    "peer_failed",
                    at,
                    attempt=attempt,
                    host=failure.host,
                    what=failure.what,
                    exit_code=failure.exit_code,
                    is_final=False,
                )
            case JobVerdict(at=at, attempt=attempt, failure=None, is_here=False):
                self._write("peers_done", at, attempt=attempt)
            case HostStopped(attempt=attempt):
                self._write("host_stopped", time.monotonic(), attempt=attempt)
            case JobVerdict(at=at, attempt=attempt, failure=failure):
                self._write(
                    "job_verdict",
                    at,
                    attempt=attempt,
                    host=None if failure is None else failure.host,
                    what=None if failure is None else failure.what,
                    exit_code=None if failure is None else failure.exit_code,
                    is_final=happening.is_final,
                    given_up=happening.given_up or None,
                )
            case SourceFailed(at=at, source=source, why=why, is_required=is_required):
                self._write("source_failed", at, source=source, why=why, is_required=is_required)
            case Refuted(at=at, faults=faults):
                self._write("strategy_rejected", at, faults=list(faults))
            case Finished(outcome=outcome, at=at):
                self._write(
                    "finished",
                    at,
                    exit_code=outcome.exit_code,
                    verdict=outcome.describe(),
                    attempts=outcome.attempts,
                    given_up=outcome.given_up or None,
                    stuck=[self._plan.processes[one].name for one in outcome.stuck],
                )
            case _:  # pragma: no cover - there are no others
                assert_never(happening)

    def close(self) -> None:
        """End the file."""
        os.close(self._fd)

    def _process(self, event: Started | Exited) -> dict[str, Value]:
        spec = self._plan.processes[event.process]
        rank = None if spec.rank is None else spec.rank.rank
        return {"process": spec.name, "rank": rank, "attempt": event.attempt}

    def _write(self, event: str, at: float, **more: Value) -> None:
        eventfile.append(self._fd, event, at, more, self._hide)
