"""Finds when and why each process of a failed job failed, and whether it only lost a peer.

A process may need seconds to exit after an exception, while its peers exit at once. So the time of
a failure is that of the exception, which the rank records (see `inject/site`), else of the exit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from fleetrun.model import LaunchPlan, ProcessSpec
from fleetrun.postmortem import causes, lastlines
from fleetrun.run.events import Exited
from fleetrun.rundir import names, rankfile, variables
from fleetrun.rundir.heartbeat import last_step
from fleetrun.rundir.rankfile import ErrorReport

# A shell's exit codes for a command that it cannot run.
_SHELL_REFUSALS = frozenset((126, 127))
# The exit of a shell is explained by an exception in a Python below it within this time.
_WRAPPER_S = 30.0
# An exit is noticed a little late, and by then peers may have raised because of it. So the time of
# these signals (ILL, BUS, FPE, KILL, SEGV) is set back, but not before an end that was noticed
# earlier: Paddle's reducer may turn the loss of a peer into a SEGV. No loss of a peer kills a rank,
# so KILL comes first: the kernel may take longer to remove that rank than its peers to fail.
_SEEN_AFTER_S = 0.1
_KILL = 9
_OWN_SIGNALS = frozenset((4, 7, 8, _KILL, 11))
# With these (HUP, INT, KILL, TERM) somebody else ends a process, whatever its log says.
_OF_OTHERS = frozenset((1, 2, _KILL, 15))
# The most logs that are read.
MOST_LOGS = 64
# Without a traceback, this many last lines are examined; earlier ones may be of a retry that
# succeeded.
_LAST = 5


def raised(spec: ProcessSpec) -> ErrorReport | None:
    """Return the exception, or failing sys.exit, that will end the process of SPEC, now alive."""
    # A wrapper may have survived the exception of its child.
    return next((record for record in reports(spec) if os.path.exists(f"/proc/{record.pid}")), None)


def has_failed(plan: LaunchPlan, index: int, exited: Exited) -> bool:
    """Whether the process INDEX, now alive, has failed before EXITED did, by an exception.

    One that a wrapper may have survived counts if EXITED has lost a peer.
    """
    records = list(reports(plan.processes[index]))
    return any(os.path.exists(f"/proc/{record.pid}") for record in records) or (
        any(exited.at - moment(record, exited.at) < _WRAPPER_S for record in records)
        and bool(_examined(plan, exited, None, with_log=True).is_victim)
    )


def reports(spec: ProcessSpec) -> Iterator[ErrorReport]:
    """Yield the exception and the failing sys.exit that the process of SPEC has recorded."""
    for record in (rankfile.exception(spec), rankfile.exit_under_way(spec)):
        if record is not None and record.pid:
            yield record


def examine(plan: LaunchPlan, exits: tuple[Exited, ...]) -> tuple[Exited, ...]:
    """Return EXITS completed from the ranks' records and logs."""
    step = last_step(spec.env.get(variables.HEARTBEAT, "") for spec in plan.processes)
    axes = rankfile.topology(map(rankfile.path_of, plan.processes))
    examined = []
    for index, exited in enumerate(exits):
        full = _examined(plan, exited, step, with_log=index < MOST_LOGS)
        rank = plan.processes[exited.process].rank
        if axes is not None and rank is not None and rank.is_trainer:
            full = full._replace(place=axes.place(rank.rank))
        examined.append(full)
    return tuple(_set_back(exited, examined) for exited in examined)


def _examined(plan: LaunchPlan, exited: Exited, step: int | None, *, with_log: bool) -> Exited:
    spec = plan.processes[exited.process]
    error = _own(rankfile.exception(spec), exited)
    exit_report = None if error else _own(rankfile.exit_under_way(spec), exited)
    words = lastlines.of(names.log_paths(plan, spec, exited.attempt))[0] if with_log else []
    last_words = words if lastlines.explains(words) else words[-_LAST:]
    failed_at, code, in_one_line = exited.at, exited.raised, ""
    if error is not None:
        failed_at, code = moment(error, exited.at), 1
        last_words = [f"{error.class_}: {error.message}", error.stack]
        in_one_line = lastlines.in_one_line(error.class_, error.message, error.stack.split("\n"))
    elif exit_report is not None:
        failed_at, code = moment(exit_report, exited.at), exit_report.code
    examined = exited._replace(
        failed_at=failed_at,
        raised=code,
        step=step,
        error=in_one_line,
        last_words=words[-1] if words else "",
    )
    if is_of_others(examined):
        return examined
    known = causes.recognise("\n".join(words))
    no_retry = known.sentence if known and not known.may_retry else ""
    if exited.status.code in _SHELL_REFUSALS:
        no_retry = "its command cannot be run."
    is_victim = causes.is_of_victim("\n".join(last_words))
    return examined._replace(is_victim=is_victim, no_retry=no_retry)


def is_of_others(exited: Exited) -> bool:
    """Whether somebody else has ended the process, so that its log does not tell why."""
    return exited.raised is None and exited.status.exit_code - 128 in _OF_OTHERS


def _set_back(exited: Exited, exits: Sequence[Exited]) -> Exited:
    """Return EXITED, one of EXITS, with the earliest time at which it can have failed.

    Those of EXITS that raised nothing were found together, whatever time was noted for each.
    """
    if exited.raised is not None or exited.status.signum not in _OWN_SIGNALS:
        return exited
    ended = [other for other in exits if other.raised is None]
    starts = [other.at - other.lived_s for other in ended if other.lived_s]
    if exited.status.signum == _KILL:
        first = min(other.at for other in ended)
        return exited._replace(failed_at=max([first - _SEEN_AFTER_S, *starts]))
    if any(other.status.signum == _KILL for other in ended):
        return exited
    earlier = [other.at for other in ended if other.at < exited.at]
    return exited._replace(failed_at=max([exited.at - _SEEN_AFTER_S, *starts, *earlier]))


def _own(error: ErrorReport | None, exited: Exited) -> ErrorReport | None:
    """Return ERROR if it ended this process."""
    if error is None or error.pid == exited.pid:
        return error
    return error if exited.at - moment(error, exited.at) < _WRAPPER_S else None


def moment(error: ErrorReport, until: float) -> float:
    """Return when ERROR was raised, in monotonic seconds; UNTIL at the latest."""
    return until if error.monotonic is None else min(error.monotonic, until)
