"""Investigates a failed job: for the report on the console, and for `report.json`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fleetrun.model import LaunchPlan
from fleetrun.plan.kinds import label
from fleetrun.postmortem import causes, failures, flight, kernelfacts, lastlines
from fleetrun.postmortem.kernelfacts import Baseline
from fleetrun.run import policy
from fleetrun.run.events import HUNG, Exited, Failure, Hung, Outcome, Recovered, signal_name
from fleetrun.rundir import (
    eventfile,
    flightfile,
    heartbeat,
    names,
    rankfile,
    reportfile,
    variables,
)
from fleetrun.rundir.folder import Folder
from fleetrun.rundir.rankfile import ErrorReport
from fleetrun.rundir.reportfile import ProcessEnd, ReportRecord, RestartRecord
from fleetrun.text import counted, sentence

# The most facts of one kind.
_MOST_FACTS = 4
_STOPPED_BY = frozenset((2, 9, 15))
# How Paddle's reducer crashes when a peer is lost, and the remedy.
_CRASHES = frozenset((signal.SIGABRT, signal.SIGSEGV))
_EARLY = (
    "This rank lost a peer that had ended early: all ranks must make the same number of updates."
)
_STOPPED = (
    "This rank lost a peer that was stopped: by SIGSTOP, Ctrl-Z, a debugger, or a batch system."
)
_THREAD = (
    "This rank lost a peer that waits for its failed thread, as Paddle's DataLoader does for ever."
)
# How Python reports an exception that ends a thread, and not its process.
_IN_THREAD = "Exception in thread "
# A process closes its connections a while before its exit is noticed: on a busy machine, Python and
# Paddle take that long to end.
_SEEN_S = 0.5


class Victim(NamedTuple):
    """A process that ended because of the culprit; `how` is stopped, peer lost, or empty."""

    exited: Exited
    after_s: float
    how: str


class Investigation(NamedTuple):
    """All findings about a failed job."""

    culprit: ProcessEnd | None = None
    # The file with its last lines: its log, or the one with its error.
    source: str = ""
    evidence: tuple[str, ...] = ()
    victims: tuple[Victim, ...] = ()


def investigate(plan: LaunchPlan, outcome: Outcome, before: Baseline) -> Investigation:
    """Determine which process failed first and why, and which ended because of it."""
    cause = outcome.cause
    if isinstance(cause, Exited):
        return _of_culprit(plan, outcome, cause, before)
    evidence: list[str] = []
    if isinstance(cause, Failure):
        known = causes.recognise(cause.words)
        is_of_network = known is not None and known.name in causes.OF_NETWORK
        evidence += plan.suspects if cause.is_victim or is_of_network else ()
        evidence += _collectives(plan, outcome, cause)
    elif isinstance(cause, Hung):
        evidence += [*_failed_threads(plan, outcome), *plan.suspects]
    return Investigation(evidence=tuple(evidence))


def _of_culprit(
    plan: LaunchPlan, outcome: Outcome, exited: Exited, before: Baseline
) -> Investigation:
    """Explain why the process that EXITED first has failed, by its log and the kernel."""
    spec = plan.processes[exited.process]
    failed_at = policy.failed_at(exited)
    words, log, source, error = last_lines_of(plan, exited)
    text = "" if failures.is_of_others(exited) else "\n".join(words)
    known = causes.recognise(text)
    if known is None and any(mark in text for mark in causes.LOADER):
        earlier = causes.recognise(lastlines.tail(log))
        known = earlier if earlier and earlier.name == causes.SHARED_MEMORY else None
    name = known.name if known else ""
    is_crash = known is None and exited.status.signum in _CRASHES
    early = _early_ends(plan, outcome, failed_at) if name in causes.LOST or is_crash else []
    stopped = _still_stopped(plan, failed_at) if name in causes.LOST else []
    is_open = (name in causes.LOST or is_crash) and not (early or stopped)
    threads = _failed_threads(plan, outcome, exited) if is_open else []
    evidence = [*kernelfacts.of(exited, before)]
    is_of_memory = name in {causes.SHARED_MEMORY, causes.DISK_FULL}
    if is_of_memory and exited.status.signum != signal.SIGBUS:
        evidence += kernelfacts.shared_memory()
    evidence += [*early, *stopped, *threads, *kernelfacts.full_disk(log)]
    ends = [other for other in outcome.exits if other.process == exited.process]
    if any(other.status != exited.status for other in ends):
        evidence.append(
            f"{ends[-1].at - failed_at:.1f} s later it still had not ended and was stopped; the "
            "code is what its exception gives."
        )
    evidence += plan.suspects if name in causes.OF_NETWORK else ()
    evidence += _collectives(plan, outcome, exited)
    peer = _STOPPED if stopped else _EARLY if early else _THREAD if threads else ""
    error = error or ErrorReport()
    devices = spec.rank.devices if spec.rank is not None else ()
    ids = ", ".join(device.id for device in devices)
    culprit = ProcessEnd(
        **_end(plan, exited),
        host=os.uname().nodename,
        devices=f"{label(devices[0].kind)} {ids}" if ids else "",
        time=round(time.time() - (time.monotonic() - failed_at), 6),
        after_s=round(failed_at - before.at, 3),
        class_=error.class_,
        message=error.message,
        stack=error.stack,
        log=log,
        last_words=tuple(words),
        known=name or None,
        remedy=peer or (known.sentence if known else ""),
        peak_bytes=exited.peak_bytes,
    )
    return Investigation(culprit, source, tuple(evidence), _victims(plan, outcome, exited))


def _early_ends(plan: LaunchPlan, outcome: Outcome, failed_at: float) -> list[str]:
    """Return which processes had ended without an error before the culprit lost its peer."""
    facts = []
    for ended in outcome.exits:
        if not ended.status.exit_code and ended.at - _SEEN_S <= failed_at:
            spec = plan.processes[ended.process]
            beat = heartbeat.read(spec.env.get(variables.HEARTBEAT, ""))
            is_ours = beat is not None and not beat.is_scripts
            updates = f" after {counted(beat.step, 'update')}," if beat and is_ours else ""
            facts.append(
                f"{sentence(ended.label)} had ended without an error{updates} "
                f"{max(failed_at - ended.at, 0.0):.1f} s before; its log is "
                f"{names.log_paths(plan, spec, ended.attempt)[0]}."
            )
    return facts[:_MOST_FACTS]


def _still_stopped(plan: LaunchPlan, failed_at: float) -> list[str]:
    """Return which ranks were stopped when the culprit lost its peer, and since when."""
    since: dict[str, float] = {}
    for event in eventfile.read(names.run_path(plan, names.EVENTS)):
        who = ", ".join(event.more.get("who") or ())
        if event.event == "restarting":
            since.clear()
        elif event.more.get("what") == "stopped" and event.monotonic <= failed_at:
            since[who] = event.monotonic
        elif event.more.get("what") == "continued":
            since.pop(who, None)
    return [
        f"{sentence(who)} was stopped (T) {failed_at - at:.1f} s before and did not go on."
        for who, at in since.items()
    ]


def _failed_threads(plan: LaunchPlan, outcome: Outcome, culprit: Exited | None = None) -> list[str]:
    """Return which processes but CULPRIT went on when an exception had ended a thread of theirs."""
    facts = []
    for ended in outcome.exits[: failures.MOST_LOGS]:
        if culprit is not None and ended.process == culprit.process:
            continue
        log = names.log_paths(plan, plan.processes[ended.process], ended.attempt)[-1]
        _, mark, after = lastlines.tail(log).rpartition(_IN_THREAD)
        # Below the thread's name and the head of the traceback.
        lines = after.split("\n")[2:]
        error = next((line for line in lines if not line.startswith(" ")), "")
        if mark:
            who, why = sentence(ended.label), error[: lastlines.LONGEST]
            facts.append(f"{who} had lost a thread to {why}; its log is {log}.")
    return facts[:_MOST_FACTS]


def _victims(plan: LaunchPlan, outcome: Outcome, culprit: Exited) -> tuple[Victim, ...]:
    """Return the processes that ended because of the CULPRIT, and how."""
    exits = outcome.exits
    victims: list[Victim] = []
    # They had failed before any was stopped; those that recorded it were still there.
    together = frozenset().union(*(exited.also_failed for exited in exits))
    for exited in exits:
        status, spec = exited.status, plan.processes[exited.process]
        if exited.process == culprit.process or not status.exit_code:
            continue
        how = ""
        was_there = exited.process not in together or any(failures.reports(spec))
        if was_there and not _STOPPED_BY.isdisjoint((status.signum, status.exit_code - 128)):
            how = "stopped"
        elif len(victims) < failures.MOST_LOGS:
            logs = names.log_paths(plan, spec, exited.attempt)
            is_lost = causes.is_of_victim("\n".join(lastlines.of(logs)[0]))
            how = "peer lost" if is_lost else ""
        after_s = max(exited.at - policy.failed_at(culprit), 0.0)
        victims.append(Victim(exited, after_s, how))
    return tuple(victims)


def _collectives(plan: LaunchPlan, outcome: Outcome, cause: Exited | Failure) -> list[str]:
    """Return the findings from the ranks' collectives, unless they only say that one has ended."""
    if not any(variables.FLIGHT_RECORDER in spec.env for spec in plan.processes):
        return []

    ranks = sum(spec.is_trainer for spec in plan.ranks)
    records = flightfile.in_folder(names.run_path(plan, ""), plan.generation)
    states: dict[int, flight.RankState] = {}
    if isinstance(cause, Exited):
        failed = cause.label
        for other in outcome.exits:
            rank = plan.processes[other.process].rank
            if rank is not None and other.attempt == cause.attempt and other.at <= cause.at:
                states[rank.rank] = flight.RankState(has_ended=True)
    elif cause.exit_code == HUNG or len(records) < ranks:
        # The verdict is known, or only the coordinator's host can tell.
        return []
    else:
        failed = cause.what
    axes = rankfile.topology(map(rankfile.path_of, plan.processes))
    job = flight.JobRanks(ranks, axes, states)
    return [
        f"{sentence(finding.text)}."
        for finding in flight.verdict(records, job, has_failed=True)
        if finding.kind == flight.DESYNC
        or (
            finding.kind == flight.MISSING
            and not any(f"{failed} ".startswith(f"rank {rank} ") for rank in finding.ranks)
        )
    ]


def last_lines_of(
    plan: LaunchPlan, exited: Exited
) -> tuple[list[str], str, str, ErrorReport | None]:
    """Return the last lines of a process, its log, the file that has them, and its error, if any.

    If standard error has its own log, the one that explains more is used.
    """
    spec = plan.processes[exited.process]
    words, log = lastlines.of(names.log_paths(plan, spec, exited.attempt))
    if failures.is_of_others(exited):
        # An exception in the log was handled.
        return words[-lastlines.PLAIN_LINES :], log, log, None
    error = rankfile.exception(spec)
    # The log has what the user saw, unless the script sent its errors elsewhere.
    if error is not None and error.text.strip() and not lastlines.explains(words):
        reported = error.text.strip("\n").rstrip().split("\n")
        return lastlines.shorten(reported), log, error.path, error
    return words, log, log, error


# For programs ------------------------------------------------------------------------------------


def write(
    folder: Folder,
    plan: LaunchPlan,
    outcome: Outcome,
    findings: Investigation,
    *,
    restarts: Sequence[Recovered] = (),
    redact: Callable[[str], str] = str,
) -> None:
    """Write report.json into the run directory atomically; raises OSError."""
    report = ReportRecord(
        outcome=outcome.describe(),
        exit_code=outcome.exit_code,
        attempts=outcome.attempts,
        time=time.time(),
        culprit=findings.culprit,
        victims=tuple(
            ProcessEnd(
                **_end(plan, victim.exited), after_s=round(victim.after_s, 3), how=victim.how
            )
            for victim in findings.victims
        ),
        evidence=findings.evidence,
        earlier=tuple(failure.reason() for failure in outcome.earlier),
        restarts=tuple(
            RestartRecord(restart.attempt, round(restart.seconds, 3), restart.why)
            for restart in restarts
        ),
    )
    reportfile.write(folder, report, redact)


def _end(plan: LaunchPlan, exited: Exited) -> dict[str, Any]:
    """Return the fields that say how a process has ended."""
    spec = plan.processes[exited.process]
    signum = exited.status.signum
    return {
        "process": spec.name,
        "rank": None if spec.rank is None else spec.rank.rank,
        "pid": exited.pid,
        "attempt": exited.attempt,
        "code": exited.status.code,
        "signal": None if signum is None else signal_name(signum),
        "fault": exited.fault or None,
    }
