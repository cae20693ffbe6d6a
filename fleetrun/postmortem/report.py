"""The report on a failed job: which process failed first, why, and its last lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from fleetrun.postmortem import causes
from fleetrun.postmortem.investigation import Investigation, Victim
from fleetrun.run.events import (
    Exited,
    Failure,
    Hung,
    Interrupted,
    Outcome,
    SourceFailed,
    StrategyRejected,
)
from fleetrun.rundir.names import listed
from fleetrun.rundir.reportfile import ProcessEnd
from fleetrun.text import sentence, visible

# The most places of a hung job that are listed.
_PLACES = 8
# The most ineffective fields to list.
_FAULTS = 12


def verdict(
    outcome: Outcome,
    findings: Investigation,
    labels: Sequence[str],
    shown: AbstractSet[int],
) -> str:
    """Return the report; the output of the processes in SHOWN is on the console already."""
    lines = [f"{sentence(outcome.describe())}."]
    match outcome.cause:
        case Exited() as exited:
            lines = [f"{exited.describe()}."]
            if findings.culprit is not None:
                is_shown = exited.process in shown
                lines = _culprit(exited, findings.culprit, findings, is_shown=is_shown)
                lines += _others(findings.victims)
        case Hung() as hang:
            lines = [*_hang(hang), *findings.evidence]
        case StrategyRejected() as rejected:
            lines = _rejected(rejected)
        case Failure() as elsewhere:
            lines = [*_elsewhere(elsewhere), *findings.evidence]
        case SourceFailed() as failed:
            lines = [f"{sentence(failed.describe())}, and the job cannot go on without it."]
        case _:
            killed = [e.label for e in outcome.exits if e.status.signum == 9]  # KILL
            if isinstance(outcome.cause, Interrupted) and killed:
                lines.append(f"{sentence(listed(killed))} had to be killed.")
    return "\n".join((*lines, *_attempts(outcome, labels, lines)))


def _elsewhere(failure: Failure) -> list[str]:
    """Return what failed first on another host, with its last lines.

    The loss of another launcher, which both ends notice, may have begun on either.
    """
    # Control characters in the text of another host must not reach the terminal.
    summary = sentence(visible(failure.describe()))
    if failure.is_hang:
        return [f"{summary}.", f"{visible(failure.host)} tells where each rank stands."]
    if not failure.is_victim:
        summary = f"{summary}: the job failed there first"
    words = [f"    {visible(line)}" for line in failure.words.split("\n") if line]
    return [f"{summary}. Its log ends with", *words] if words else [f"{summary}."]


def _attempts(outcome: Outcome, labels: Sequence[str], reported: Sequence[str]) -> list[str]:
    """Say which attempt it was, why there is no other unless REPORTED, and what is left."""
    lines = []
    if outcome.earlier:
        first = outcome.earlier[0].reason()
        # As in log files' names and $PADDLE_RESTART_COUNT.
        last = f"attempt {outcome.attempts - 1} (counted from 0)"
        lines.append(f"It was {last}; the first failed because {first}.")
    if outcome.given_up:
        why = outcome.given_up
        # It continues a sentence; names of signals and options keep their case.
        why = f"{why[:1].lower()}{why[1:]}" if why[1:2].islower() else why
        known = "another attempt cannot fix that." if outcome.given_up in reported else why
        lines.append(f"It was not started again: {known}")
    if outcome.stuck:
        stuck_labels = listed([labels[index] for index in outcome.stuck])
        lines.append(
            f"Even SIGKILL did not end {stuck_labels}: a driver or a file system does not respond."
        )
    return lines


def _hang(hang: Hung) -> list[str]:
    """Describe where the ranks stand, odd ones first."""
    missed = "there was no heartbeat, output, collective or disk use"
    lines = [f"The job hung: for {hang.seconds:.0f} s {missed}."]
    lines += [f"    {sentence(text)}." for _, text in hang.collectives]
    # Where all wait for each other, none is unlike the rest.
    known = {label for labels, _ in hang.places for label in labels}
    odd = set(hang.odd) if known - set(hang.odd) else set[str]()
    # Ranks whose stacks differ only between both ends stand in what reads as one place.
    together: dict[tuple[str, bool], list[str]] = {}
    for labels, where in hang.places:
        together.setdefault((where, odd.issuperset(labels)), []).extend(labels)
    for (where, is_alone), standing in list(together.items())[:_PLACES]:
        # By number.
        standing.sort(key=lambda label: (len(label), label))
        stand = "stands" if len(standing) == 1 else "stand"
        alone = ", unlike the rest" if is_alone else ""
        lines.append(f"    {sentence(listed(standing))} {stand} in {where}{alone}.")
    if len(together) > _PLACES:
        lines.append(f"    The others stand in {len(together) - _PLACES} more places.")
    if not hang.places:
        lines.append(
            "    No rank is in Python code: it ends, or runs native code or another program."
        )
    return [*lines, f"All stacks are in {hang.stacks}."]


def _rejected(rejected: StrategyRejected) -> list[str]:
    """Return which fields of the strategy are not in effect, and on which ranks."""
    lines = ["The strategy is not in effect as asked, and --strategy_strict requires it:"]
    if rejected.is_split:
        lines = ["Some ranks apply the strategy and others cannot: they would wait for each other."]
    lines += [f"    {sentence(fault)}." for fault in rejected.faults[:_FAULTS]]
    if len(rejected.faults) > _FAULTS:
        lines.append(f"    {len(rejected.faults) - _FAULTS} more faults.")
    return lines


def _culprit(
    exited: Exited, culprit: ProcessEnd, findings: Investigation, *, is_shown: bool
) -> list[str]:
    """Return which process failed first, where, when and why, with its last lines."""
    if exited.fault:
        return [exited.describe()]
    cause = exited.describe()
    if exited.status.signum is not None:
        cause = f"{exited.name} was killed by {causes.meaning(exited.status.signum)}"
    place = f"{culprit.host} ({culprit.devices})" if culprit.devices else culprit.host
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(culprit.time))
    since = f"{culprit.after_s:.1f} s after the start"
    lines = [
        f"{cause}.",
        f"It failed first, on {place}, pid {exited.pid}, at {when}, {since}.",
        *findings.evidence,
    ]
    last = culprit.last_words
    words = [f"    {line}" for line in last if line or len(last) > 1]
    if words and findings.source != culprit.log:
        lines += [f"Its log is {culprit.log}; {findings.source} ends with", *words]
    elif words and not is_shown:
        lines += [f"Its log is {culprit.log}, which ends with", *words]
    else:
        lines.append(f"Its log is {culprit.log}.")
    return [*lines, culprit.remedy] if culprit.remedy else lines


def _others(victims: Sequence[Victim]) -> list[str]:
    """Return one line about those that ended because of the culprit."""
    stopped = [victim.exited.label for victim in victims if victim.how == "stopped"]
    lost = [victim for victim in victims if victim.how == "peer lost"]
    failed = [
        f"{victim.exited.describe()} {victim.after_s:.1f} s later"
        for victim in victims
        if not victim.how
    ]
    parts = []
    if stopped:
        were = "were" if len(stopped) > 1 else "was"
        parts.append(f"{listed(stopped)} {were} stopped by fleetrun")
    if lost:
        # From the first to the last.
        when = " to ".join(dict.fromkeys(f"{lost[at].after_s:.1f}" for at in (0, -1)))
        labels = listed([victim.exited.label for victim in lost])
        parts.append(f"{labels} failed {when} s later: peer lost")
    if len(failed) > 3:  # a handful is a list, more is noise
        failed[3:] = [f"{len(failed) - 3} more failed after that"]
    parts += failed
    return [f"After that {'; '.join(parts)}."] if parts else []
