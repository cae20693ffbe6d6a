"""Investigates a failed job: for the report on the console, and for `report.json`."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fleetrun.cli.argv import refused
from fleetrun.model import LaunchPlan, RankSpec
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
    cause = outcome.cause
    if isinstance(cause, Exited):
        return _Culprit(plan, outcome, cause, before).explain()
    evidence: list[str] = []
    if isinstance(cause, Failure):
        # The coordinator's host hears of all ranks.
        if cause.is_victim:
            evidence += _still_stopped(plan, time.monotonic())
        if cause.is_victim or _is_of_network(causes.recognise(cause.words)):
            evidence += plan.suspects
        evidence += _collectives(plan, outcome, cause)
    elif isinstance(cause, Hung):
        evidence += plan.suspects
    topology = rankfile.topology(map(rankfile.path_of, plan.processes))
    return Investigation(evidence=tuple(evidence), topology=topology)


class _Culprit:
    """The process that EXITED first, and what its log and the kernel tell about it."""

    def __init__(
        self, plan: LaunchPlan, outcome: Outcome, exited: Exited, before: Baseline
    ) -> None:
        self._plan, self._outcome, self._exited, self._before = plan, outcome, exited, before
        self._spec = plan.processes[exited.process]
        self._failed_at = policy.failed_at(exited)
        self._words, self._log, self._source, self._error = last_lines_of(plan, exited)
        text = "\n".join(self._words)
        self._known = causes.recognise(text)
        if self._known is None and any(mark in text for mark in causes.LOADER):
            earlier = causes.recognise(lastlines.tail(self._log))
            self._known = earlier if earlier and earlier.name == "shared-memory" else None
        self._is_lost = self._known is not None and self._known.name in causes.LOST

    def explain(self) -> Investigation:
        """Explain the failure."""
        exited, known = self._exited, self._known
        mute = kernelfacts.unwritable(os.path.dirname(self._log))
        early = self._early_ends()
        stopped = _still_stopped(self._plan, self._failed_at) if self._is_lost else []
        evidence = (
            *kernelfacts.of(exited, self._before),
            *self._killed_children(),
            *self._shared_memory(),
            *early,
            *stopped,
            *self._slow_end(),
            *(self._plan.suspects if _is_of_network(known) else ()),
            *self._interpreter(),
            *self._misplaced(),
            *_collectives(self._plan, self._outcome, exited),
            *mute,
        )
        remedy = ""
        if known := known or causes.recognise("".join(mute)):
            remedy = _STOPPED if stopped else _EARLY if early else known.sentence
        rank, error = self._spec.rank, self._error or ErrorReport()
        culprit = ProcessEnd(
            **_end(self._plan, exited),
            host=os.uname().nodename,
            devices="" if rank is None else devices_of(rank),
            time=round(time.time() - (time.monotonic() - self._failed_at), 6),
            after_s=round(self._failed_at - self._before.at, 3),
            class_=error.class_,
            message=error.message,
            stack=error.stack,
            log=self._log,
            last_words=tuple(self._words),
            known=known.name if known else None,
            remedy=remedy,
            peak_bytes=exited.peak_bytes,
        )
        return Investigation(culprit, self._source, evidence, self._victims())

    def _killed_children(self) -> list[str]:
        """Say which processes that the rank had started a signal has killed."""
        has_children = self._error is not None and self._error.children
        report = self._error if has_children else rankfile.exit_under_way(self._spec)
        facts = []
        for pid, signum in report.children if report else ():
            if pid is not None and signum is not None:
                how = causes.meaning(signum)
                facts.append(f"Process {pid}, which it had started, was killed by {how}.")
                facts += kernelfacts.of_child(pid, signum, self._before)
        return facts

    def _shared_memory(self) -> list[str]:
        """Return the size of shared memory if it has run out."""
        has_run_out = self._known is not None and self._known.name in _SHARED
        is_told = self._exited.status.signum == signal.SIGBUS
        return kernelfacts.shared_memory() if has_run_out and not is_told else []

    def _early_ends(self) -> list[str]:
        """Return which processes had ended without an error before it lost its peer."""
        is_crash = self._known is None and self._exited.status.signum in _CRASHES
        if not self._is_lost and not is_crash:
            return []
        facts = []
        for ended in self._outcome.exits:
            if not ended.status.exit_code and ended.at - _SEEN_S <= self._failed_at:
                spec = self._plan.processes[ended.process]
                beat = heartbeat.read(spec.env.get(variables.HEARTBEAT, ""))
                updates = ""
                if beat is not None and not beat.is_scripts:
                    updates = f" after {counted(beat.step, 'update')},"
                facts.append(
                    f"{sentence(ended.label)} had ended without an error{updates} "
                    f"{max(self._failed_at - ended.at, 0.0):.1f} s before; its log is "
                    f"{names.log_path(self._plan, spec, ended.attempt)}."
                )
        return facts[:_MOST_EARLY]

    def _interpreter(self) -> list[str]:
        """Say which Python could not import a module, and whether another one is activated."""
        argv, name = self._spec.argv, self._known.name if self._known else ""
        if name not in {"no-paddle", "missing-module"} or not argv:
            return []
        program = shutil.which(argv[0]) or argv[0]
        if "python" not in os.path.basename(program):
            return []
        facts = [f"There is no Paddle in {program}."] if name == "no-paddle" else []
        venv = os.environ.get("VIRTUAL_ENV", "")
        inside = os.path.join(os.path.abspath(venv), "")
        if venv and not os.path.abspath(program).startswith(inside):
            facts.append(f"VIRTUAL_ENV is {venv}, but the rank ran {program}.")
        return facts

    def _misplaced(self) -> list[str]:
        """Say which of the words that the script has refused is an option of fleetrun."""
        if self._known is None or self._known.name != "usage":
            return []
        option = refused(self._spec.argv[1:], "\n".join(self._words))
        if option is None:
            return []
        return [f"{option} is an option of fleetrun, too: it takes options only before the script."]

    def _slow_end(self) -> list[str]:
        """Return a sentence if it did not exit by itself after its exception."""
        process, status = self._exited.process, self._exited.status
        ends = [exited for exited in self._outcome.exits if exited.process == process]
        if all(exited.status == status for exited in ends):
            return []
        delay = f"{ends[-1].at - self._failed_at:.1f} s later it still had not ended"
        return [f"{delay} and was stopped; the code is what its exception gives."]

    def _victims(self) -> tuple[Victim, ...]:
        exits = self._outcome.exits
        victims: list[Victim] = []
        # They had failed before any was stopped; those that recorded it were still there.
        together = frozenset().union(*(exited.also_failed for exited in exits))
        for exited in exits:
            status, spec = exited.status, self._plan.processes[exited.process]
            if exited.process == self._exited.process or not status.exit_code:
                continue
            how = ""
            was_there = exited.process not in together or any(failures.reports(spec))
            if was_there and not _STOPPED_BY.isdisjoint((status.signum, status.exit_code - 128)):
                how = "stopped"
            elif sum(victim.how != "stopped" for victim in victims) < _MOST_LOGS:
                logs = names.log_paths(self._plan, spec, exited.attempt)
                is_lost = causes.is_of_victim("\n".join(lastlines.of(logs)[0]))
                how = "peer lost" if is_lost else ""
            victims.append(Victim(exited, max(exited.at - self._failed_at, 0.0), how))
        return tuple(victims)


def _is_of_network(known: KnownFailure | None) -> bool:
    """Whether an interface may have caused the failure."""
    return known is not None and known.name in {*causes.LOST, causes.GLOO_INTERFACE}


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
        reported = lastlines.shorten(reported)
        words, source = (reported, error.path) if any(reported) else (words, source)
    return words, log, source, error


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


def devices_of(rank: RankSpec) -> str:
    """Name the devices of RANK; nothing: it has none."""
    ids = ", ".join(device.id for device in rank.devices)
    return f"{label(rank.devices[0].kind)} {ids}" if ids else ""


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
