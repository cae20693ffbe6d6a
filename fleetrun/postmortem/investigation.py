"""Investigates a failed job: for the report on the console, and for `report.json`."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fleetrun.cli.argv import refused
from fleetrun.model import LaunchPlan, ProcessSpec, RankSpec
from fleetrun.plan.kinds import label
from fleetrun.postmortem import causes, failures, flight, kernelfacts, lastlines
from fleetrun.postmortem.causes import KnownFailure
from fleetrun.postmortem.kernelfacts import Baseline
from fleetrun.run import policy
from fleetrun.run.events import HUNG, Exited, Failure, Hung, Outcome, Recovered, signal_name
from fleetrun.rundir import (
    eventfile,
    flightfile,
    heartbeat,
    names,
    rankfile,
    reading,
    reportfile,
    variables,
)
from fleetrun.rundir.folder import Folder
from fleetrun.rundir.rankfile import ErrorReport
from fleetrun.rundir.reportfile import (
    ProcessEnd,
    ReportRecord,
    RestartRecord,
)
from fleetrun.text import counted, sentence

# The signals that stop ranks.
_STOPPED_BY = frozenset((2, 9, 15))
# The logs of victims that are read, each from its end.
_MOST_LOGS = 64
# How many lines of a half-written error file to show.
_RAW_LINES = 5
_SHARED = frozenset(("shared-memory", "shared-memory-full"))
# How Paddle's reducer crashes when a peer is lost, and the remedy.
_CRASHES = frozenset((signal.SIGABRT, signal.SIGSEGV))
_EARLY = (
    "This rank lost a peer that had ended early: all ranks must make the same number of updates."
)
_STOPPED = (
    "This rank lost a peer that was stopped: by SIGSTOP, Ctrl-Z, a debugger, or a batch system."
)
# The most processes to list that had ended before. A process closes its connections a while before
# its exit is noticed: on a busy machine, Python and Paddle take that long to end.
_MOST_EARLY = 4
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
    # The ranks' places in fleet's topology; None: unknown.
    topology: rankfile.RankAxes | None = None


def investigate(plan: LaunchPlan, outcome: Outcome, before: Baseline) -> Investigation:
    """Determine which process failed first and why, and which ended because of it."""
    culprit = outcome.cause
    if isinstance(culprit, Exited):
        return _explained(plan, outcome, culprit, before)
    evidence: list[str] = []
    if isinstance(culprit, Failure):
        # The coordinator's host hears of all ranks.
        if culprit.is_victim:
            evidence += _still_stopped(plan, time.monotonic())
        if culprit.is_victim or _is_of_network(causes.recognise(culprit.words)):
            evidence += plan.suspects
        evidence += _collectives(plan, outcome, culprit)
    elif isinstance(culprit, Hung):
        evidence += plan.suspects
    topology = rankfile.topology(map(rankfile.path_of, plan.processes))
    return Investigation(evidence=tuple(evidence), topology=topology)


def _explained(
    plan: LaunchPlan, outcome: Outcome, exited: Exited, before: Baseline
) -> Investigation:
    """Explain the failure of the process that EXITED first."""
    spec = plan.processes[exited.process]
    failed_at = policy.failed_at(exited)
    words, log, source, reported = last_lines_of(plan, exited)
    text = "\n".join(words)
    known = causes.recognise(text) or causes.recognise_loader(text, lastlines.tail(log))
    mute = kernelfacts.unwritable(os.path.dirname(log))
    early = _early_ends(plan, outcome, exited, known)
    if early and known is not None:
        known = known._replace(sentence=_EARLY)
    stopped = _still_stopped(plan, failed_at) if known and known.name in causes.LOST else []
    if stopped and known is not None:
        known = known._replace(sentence=_STOPPED)
    evidence = (
        *kernelfacts.of(exited, before),
        *_killed_children(spec, reported, before),
        *_shared_memory(exited, known),
        *early,
        *stopped,
        *_slow_end(outcome, exited, failed_at),
        *(plan.suspects if _is_of_network(known) else ()),
        *_interpreter(spec.argv, known),
        *_misplaced(spec.argv, known, text),
        *_collectives(plan, outcome, exited),
        *mute,
    )
    known = known or causes.recognise("".join(mute))
    error = reported or ErrorReport()
    culprit = ProcessEnd(
        **_end(plan, exited),
        host=os.uname().nodename,
        devices="" if spec.rank is None else devices_of(spec.rank),
        time=round(time.time() - (time.monotonic() - failed_at), 6),
        after_s=round(failed_at - before.at, 3),
        class_=error.class_,
        message=error.message,
        stack=error.stack,
        raw=error.raw,
        log=log,
        last_words=tuple(words),
        known=known.name if known else None,
        remedy=known.sentence if known else "",
        peak_bytes=exited.peak_bytes,
    )
    return Investigation(culprit, source, evidence, _victims(plan, outcome, exited))


def _is_of_network(known: KnownFailure | None) -> bool:
    """Whether an interface may have caused the failure."""
    return known is not None and known.name in {*causes.LOST, causes.GLOO_INTERFACE}


def _killed_children(
    spec: ProcessSpec, reported: ErrorReport | None, before: Baseline
) -> list[str]:
    """Say which processes that the rank had started a signal has killed."""
    report = reported if reported and reported.children else rankfile.exit_under_way(spec)
    facts = []
    for pid, signum in report.children if report else ():
        if pid is not None and signum is not None:
            how = causes.meaning(signum)
            facts.append(f"Process {pid}, which it had started, was killed by {how}.")
            facts += kernelfacts.of_child(pid, signum, before)
    return facts


def _collectives(plan: LaunchPlan, outcome: Outcome, cause: Exited | Failure) -> list[str]:
    """Return the findings from the ranks' collectives, unless they only say that one has ended."""
    if not any(variables.FLIGHT_RECORDER in spec.env for spec in plan.processes):
        return []

    ranks = sum(spec.is_trainer for spec in plan.ranks)
    records = flightfile.in_folder(names.run_path(plan, ""), plan.generation)
    states: dict[int, flight.RankState] = {}
    if isinstance(cause, Exited):
        failed = cause.label
        states = {
            rank.rank: flight.RankState(has_ended=True)
            for other in outcome.exits
            if other.attempt == cause.attempt and other.at <= cause.at
            if (rank := plan.processes[other.process].rank) is not None
        }
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
    source = log
    error = rankfile.exception(spec)
    # The log has what the user saw, unless the script sent its errors elsewhere.
    if error is not None and not lastlines.explains(words):
        reported = error.text.strip("\n").rstrip().split("\n")
        reported = reported[:_RAW_LINES] if error.raw else lastlines.shorten(reported)
        words, source = (reported, error.path) if any(reported) else (words, source)
    return words, log, source, error


def _shared_memory(exited: Exited, known: KnownFailure | None) -> list[str]:
    """Return the size of shared memory if it has run out."""
    is_told = exited.status.signum == signal.SIGBUS
    return kernelfacts.shared_memory() if known and known.name in _SHARED and not is_told else []


def _early_ends(
    plan: LaunchPlan, outcome: Outcome, culprit: Exited, known: KnownFailure | None
) -> list[str]:
    """Return which processes had ended without an error before CULPRIT lost its peer."""
    is_lost = known is not None and known.name in causes.LOST
    if not is_lost and (known is not None or culprit.status.signum not in _CRASHES):
        return []
    failed_at = policy.failed_at(culprit)
    return [
        f"{sentence(ended.label)} had ended without an error"
        f"{_updates_of(plan, ended)} {max(failed_at - ended.at, 0.0):.1f} s before; its log is "
        f"{names.log_path(plan, plan.processes[ended.process], ended.attempt)}."
        for ended in outcome.exits
        if not ended.status.exit_code and ended.at - _SEEN_S <= failed_at
    ][:_MOST_EARLY]


def _still_stopped(plan: LaunchPlan, failed_at: float) -> list[str]:
    """Return which ranks were stopped when a rank lost its peer, and since when."""
    since: dict[str, float] = {}
    for event in eventfile.read(names.run_path(plan, names.EVENTS)):
        if event.event == "restarting":
            since.clear()
        elif event.event == "peer_failed":
            failed_at = min(failed_at, event.monotonic)
        who = ", ".join(reading.items(event.more.get("who")))
        if event.more.get("what") == "stopped":
            since[who] = event.monotonic
        elif event.more.get("what") == "continued":
            since.pop(who, None)
    return [
        f"{sentence(who)} was stopped (T) {failed_at - at:.1f} s before and did not go on."
        for who, at in since.items()
        if at <= failed_at
    ][:_MOST_EARLY]


def _updates_of(plan: LaunchPlan, ended: Exited) -> str:
    """Return after how many updates a process has ENDED, if its heartbeat says so."""
    path = plan.processes[ended.process].env.get(variables.HEARTBEAT, "")
    beat = heartbeat.read(path)
    if beat is None or beat.is_scripts:
        return ""
    return f" after {counted(beat.step, 'update')},"


def _interpreter(argv: Sequence[str], known: KnownFailure | None) -> list[str]:
    """Say which Python could not import a module, and whether another one is activated."""
    if known is None or known.name not in {"no-paddle", "missing-module"} or not argv:
        return []

    program = shutil.which(argv[0]) or argv[0]
    if "python" not in os.path.basename(program):
        return []
    facts = [f"There is no Paddle in {program}."] if known.name == "no-paddle" else []
    venv = os.environ.get("VIRTUAL_ENV", "")
    if venv and not os.path.abspath(program).startswith(os.path.join(os.path.abspath(venv), "")):
        facts.append(f"VIRTUAL_ENV is {venv}, but the rank ran {program}.")
    return facts


def _misplaced(words: Sequence[str], known: KnownFailure | None, text: str) -> list[str]:
    """Say which of the script's WORDS, refused in TEXT, is an option of fleetrun."""
    if known is None or known.name != "usage":
        return []

    option = refused(words[1:], text)
    if option is None:
        return []
    return [f"{option} is an option of fleetrun, too: it takes options only before the script."]


def _slow_end(outcome: Outcome, culprit: Exited, failed_at: float) -> list[str]:
    """Return a sentence if CULPRIT, after its exception, did not exit by itself."""
    ends = [exited for exited in outcome.exits if exited.process == culprit.process]
    if all(exited.status == culprit.status for exited in ends):
        return []
    delay = f"{ends[-1].at - failed_at:.1f} s later it still had not ended and was stopped"
    return [f"{delay}; the code is what its exception gives."]


def devices_of(rank: RankSpec) -> str:
    """Name the devices of RANK; nothing: it has none."""
    ids = ", ".join(device.id for device in rank.devices)
    return f"{label(rank.devices[0].kind)} {ids}" if ids else ""


def _victims(plan: LaunchPlan, outcome: Outcome, culprit: Exited) -> tuple[Victim, ...]:
    victims = []
    failed_at = policy.failed_at(culprit)
    unread = _MOST_LOGS
    # They had failed before any was stopped; those that recorded it were still there.
    together = frozenset().union(*(exited.also_failed for exited in outcome.exits))
    for exited in outcome.exits:
        if exited.process == culprit.process or not exited.status.exit_code:
            continue
        spec = plan.processes[exited.process]
        signums = {exited.status.signum, exited.status.exit_code - 128}
        how = ""
        was_there = exited.process not in together or any(failures.reports(spec))
        if was_there and not signums.isdisjoint(_STOPPED_BY):
            how = "stopped"
        elif unread:
            unread -= 1
            words, _ = lastlines.of(names.log_paths(plan, spec, exited.attempt))
            how = "peer lost" if causes.is_of_victim("\n".join(words)) else ""
        victims.append(Victim(exited, max(exited.at - failed_at, 0.0), how))
    return tuple(victims)


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
        restarts=tuple(RestartRecord(**restart.document()) for restart in restarts),
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
