"""Investigates a failed job: for the report on the console, and for `report.json`."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.conversion import counted
from fleetrun.plan.kinds import label
from fleetrun.plan.visible import sentence
from fleetrun.postmortem import causes, kernelfacts, lastlines
from fleetrun.records import flightfile, names, rankfile, reportfile, variables
from fleetrun.records.heartbeat import is_scripts, read_step
from fleetrun.records.rankfile import ErrorReport
from fleetrun.records.reportfile import CulpritRecord, EndRecord, ReportRecord, VictimRecord
from fleetrun.run import policy
from fleetrun.run.events import Exited, signal_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fleetrun.model import LaunchPlan, RankSpec
    from fleetrun.postmortem.causes import KnownFailure
    from fleetrun.postmortem.kernelfacts import Baseline
    from fleetrun.records.folder import Folder
    from fleetrun.run.events import Outcome, Recovered

# The signals that stop ranks.
_STOPPED_BY = frozenset((2, 9, 15))
# The logs of victims that are read, each from its end.
_MOST_LOGS = 64
# Of a half-written error file.
_RAW_LINES = 5
_SHARED = frozenset(("shared-memory", "shared-memory-full"))
# Crashes of Paddle's reducer at the loss of a peer, and the remedy for them.
_CRASHES = frozenset((signal.SIGABRT, signal.SIGSEGV))
_EARLY = (
    "This rank lost a peer that had ended early: all ranks must make the same number of updates."
)
# The most processes to list that had ended before; an exit is seen a little after it happened.
_MOST_EARLY = 4
_SEEN_S = 0.1


class Culprit(NamedTuple):
    """The process that failed first; its last lines come from `source`, the log or error file."""

    exited: Exited
    host: str
    # As `GPU 2`; nothing on the CPU.
    devices: str
    # Seconds since 1970, and since the job began.
    wall: float
    after_s: float
    log: str
    words: tuple[str, ...]
    source: str
    error: ErrorReport | None
    known: KnownFailure | None
    evidence: tuple[str, ...]


class Victim(NamedTuple):
    """A process that ended because of that: `how` is stopped, peer lost, or nothing."""

    exited: Exited
    after_s: float
    how: str


class Investigation(NamedTuple):
    """All findings about a failed job."""

    culprit: Culprit | None = None
    victims: tuple[Victim, ...] = ()
    # Where fleet has put the ranks; None: not known.
    topology: rankfile.RankAxes | None = None


def investigate(plan: LaunchPlan, outcome: Outcome, before: Baseline) -> Investigation:
    """Find the process that failed first, why, and those that ended because of it."""
    culprit = outcome.cause
    if not isinstance(culprit, Exited):
        return Investigation(topology=rankfile.topology(map(rankfile.path_of, plan.processes)))
    return Investigation(_culprit(plan, outcome, culprit, before), _victims(plan, outcome, culprit))


def _culprit(plan: LaunchPlan, outcome: Outcome, exited: Exited, before: Baseline) -> Culprit:
    spec = plan.processes[exited.process]
    failed_at = policy.failed_at(exited)
    words, log, source, error = last_lines_of(plan, exited)
    said = "\n".join(words)
    known = causes.recognise(said) or causes.recognise_loader(said, lastlines.tail(log))
    mute = kernelfacts.unwritable(os.path.dirname(log))
    early = _early_ends(plan, outcome, exited, known)
    if early and known is not None:
        known = known._replace(sentence=_EARLY)
    return Culprit(
        exited=exited,
        host=os.uname().nodename,
        devices="" if spec.rank is None else devices_of(spec.rank),
        wall=time.time() - (time.monotonic() - failed_at),
        after_s=failed_at - before.at,
        log=log,
        words=tuple(words),
        source=source,
        error=error,
        known=known or causes.recognise("".join(mute)),
        evidence=(
            *kernelfacts.of(exited, before),
            *_shared_memory(exited, known),
            *early,
            *_slow_end(outcome, exited, failed_at),
            *_interpreter(spec.argv, known),
            *_collectives(plan, outcome, exited),
            *mute,
        ),
    )


def _collectives(plan: LaunchPlan, outcome: Outcome, exited: Exited) -> list[str]:
    """Return the findings in the ranks' collectives, unless they only say that this one ended."""
    if variables.FLIGHT_RECORDER not in plan.processes[exited.process].env:
        return []
    from fleetrun.postmortem import flight  # only where they are recorded

    states = {
        rank.rank: flight.RankState(has_ended=True)
        for one in outcome.exits
        if one.attempt == exited.attempt and one.at <= exited.at
        if (rank := plan.processes[one.process].rank) is not None
    }
    axes = rankfile.topology(map(rankfile.path_of, plan.processes))
    job = flight.JobRanks(sum(spec.is_trainer for spec in plan.ranks), axes, states)
    own = plan.processes[exited.process].rank
    found = flight.verdict(
        flightfile.of_folder(names.run_path(plan, ""), plan.generation), job, has_failed=True
    )
    return [
        f"{sentence(one.text)}."
        for one in found
        if one.kind == flight.DESYNC
        or (one.kind == flight.MISSING and own is not None and own.rank not in one.ranks)
    ]


def last_lines_of(
    plan: LaunchPlan, exited: Exited
) -> tuple[list[str], str, str, ErrorReport | None]:
    """Return the last lines of a process, its log, the file that has them, and its error, if any.

    Where standard error has a log of its own, it is the one that says more of the failure.
    """
    spec = plan.processes[exited.process]
    words, log = lastlines.of(names.log_paths(plan, spec, exited.attempt))
    source = log
    error = rankfile.exception(spec)
    # The log has what the user saw, unless the script sent its errors elsewhere.
    if error is not None and not lastlines.explains(words):
        reported = error.stack.rstrip().split("\n") if error.stack else []
        reported = lastlines.shorten(reported) or error.raw.strip().split("\n")[:_RAW_LINES]
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
        f"{one.label[:1].upper()}{one.label[1:]} had ended without an error"
        f"{_updates_of(plan, one)} {max(failed_at - one.at, 0.0):.1f} s before; its log is "
        f"{names.log_path(plan, plan.processes[one.process], one.attempt)}."
        for one in outcome.exits
        if not one.status.exit_code and one.at - _SEEN_S <= failed_at
    ][:_MOST_EARLY]


def _updates_of(plan: LaunchPlan, ended: Exited) -> str:
    """Return after how many updates a process has ENDED, if its heartbeat says so."""
    path = plan.processes[ended.process].env.get(variables.HEARTBEAT, "")
    step = read_step(path)
    if step is None or is_scripts(path):
        return ""
    return f" after {counted(step, 'update')},"


def _interpreter(argv: Sequence[str], known: KnownFailure | None) -> list[str]:
    """Return which Python could not import a module, and whether another one is activated."""
    if known is None or known.name not in {"no-paddle", "missing-module"} or not argv:
        return []
    import shutil  # only after a failure

    program = shutil.which(argv[0]) or argv[0]
    if "python" not in os.path.basename(program):
        return []
    said = [f"There is no Paddle in {program}."] if known.name == "no-paddle" else []
    venv = os.environ.get("VIRTUAL_ENV", "")
    if venv and not os.path.abspath(program).startswith(os.path.join(os.path.abspath(venv), "")):
        said.append(f"VIRTUAL_ENV is {venv}, but the rank ran {program}.")
    return said


def _slow_end(outcome: Outcome, culprit: Exited, failed_at: float) -> list[str]:
    """Return a sentence if CULPRIT, after its exception, did not exit by itself."""
    ends = [one for one in outcome.exits if one.process == culprit.process]
    if all(one.status == culprit.status for one in ends):
        return []
    said = f"{ends[-1].at - failed_at:.1f} s later it still had not ended and was stopped"
    return [f"{said}; the code is what its exception gives."]


def devices_of(rank: RankSpec) -> str:
    """Name the devices of RANK; nothing: it has none."""
    ids = ", ".join(device.id for device in rank.devices)
    return f"{label(rank.devices[0].kind)} {ids}" if ids else ""


def _victims(plan: LaunchPlan, outcome: Outcome, culprit: Exited) -> tuple[Victim, ...]:
    found = []
    failed_at = policy.failed_at(culprit)
    unread = _MOST_LOGS
    for one in outcome.exits:
        if one.process == culprit.process or not one.status.exit_code:
            continue
        how = ""
        if one.status.signum in _STOPPED_BY or one.status.exit_code - 128 in _STOPPED_BY:
            how = "stopped"
        elif unread:
            unread -= 1
            spec = plan.processes[one.process]
            words, _ = lastlines.of(names.log_paths(plan, spec, one.attempt))
            known = causes.recognise("\n".join(words))
            how = "peer lost" if known and known.name in causes.LOST else ""
        found.append(Victim(one, max(one.at - failed_at, 0.0), how))
    return tuple(found)


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
    culprit = findings.culprit
    report = ReportRecord(
        outcome=outcome.describe(),
        exit_code=outcome.exit_code,
        attempts=outcome.attempts,
        time=time.time(),
        culprit=None if culprit is None else _record(plan, culprit),
        victims=tuple(
            VictimRecord(_end(plan, victim.exited), round(victim.after_s, 3), victim.how)
            for victim in findings.victims
        ),
        evidence=culprit.evidence if culprit else (),
        earlier=tuple(one.describe() for one in outcome.earlier),
        restarts=tuple(one.document() for one in restarts),
    )
    reportfile.write(folder, report, redact)


def _record(plan: LaunchPlan, culprit: Culprit) -> CulpritRecord:
    error = culprit.error or ErrorReport()
    known = culprit.known
    return CulpritRecord(
        _end(plan, culprit.exited),
        host=culprit.host,
        devices=culprit.devices,
        time=round(culprit.wall, 6),
        after_s=round(culprit.after_s, 3),
        kind=error.kind,
        message=error.message,
        stack=error.stack,
        raw=error.raw,
        log=culprit.log,
        last_words=culprit.words,
        known=known.name if known else None,
        remedy=known.sentence if known else "",
        peak_bytes=culprit.exited.peak_bytes,
    )


def _end(plan: LaunchPlan, exited: Exited) -> EndRecord:
    spec = plan.processes[exited.process]
    signum = exited.status.signum
    return EndRecord(
        process=spec.name,
        rank=None if spec.rank is None else spec.rank.rank,
        pid=exited.pid,
        attempt=exited.attempt,
        code=exited.status.code,
        signal=None if signum is None else signal_name(signum),
        fault=exited.fault or None,
    )
