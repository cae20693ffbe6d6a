"""Finds a rank whose exception should have ended it, while it still runs.

An exit handler, a thread, or the destructor of a device may wait forever; the other ranks then
wait for this one in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from fleetrun.model import ExitStatus, LaunchPlan
from fleetrun.postmortem import failures
from fleetrun.run import proc
from fleetrun.run.events import Exited, Overdue
from fleetrun.run.observers import ObservedJob
from fleetrun.rundir import names, rankfile, reading
from fleetrun.rundir.rankfile import ErrorReport
from fleetrun.text import sentence


def find(
    plan: LaunchPlan, running: Iterable[int], without_report: dict[int, int], *, with_exits: bool
) -> Mapping[int, ErrorReport]:
    """Return the reports of those RUNNING processes that should end by themselves, and have not.

    WITHOUT_REPORT keeps the sizes of records that have none: they are read again when they grow.
    A failing sys.exit counts only WITH_EXITS: the script's `finally` may be at work.
    """
    raised = {}
    for process in running:
        spec = plan.processes[process]
        size = reading.size(rankfile.path_of(spec))
        if size == without_report.get(process):
            continue
        report = failures.raised(spec)
        if report is None:
            without_report[process] = size
        elif not proc.reads_terminal(report.pid or 0):
            # Else its user looks at the exception with a debugger.
            raised[process] = report
    is_due = with_exits or any(report.code is None for report in raised.values())
    return raised if is_due else {}


def failure(
    job: ObservedJob, running: Mapping[int, tuple[int, int]], raised: Mapping[int, ErrorReport]
) -> Overdue:
    """Return the failure of the first that has RAISED, and log it.

    RUNNING has the pid and the attempt of each process.
    """
    now = time.monotonic()
    at, process = min((failures.moment(report, now), process) for process, report in raised.items())
    report, label = raised[process], names.label(job.plan.processes[process])
    what = f"raised {report.class_ or 'an exception'}"
    if report.code is not None:
        what = f"called sys.exit({report.code})"
    job.log(f"{sentence(label)} {what} {now - at:.0f} s ago and has not ended; the job ends.")
    code = report.code or 1
    return Overdue(
        Exited(
            process,
            label,
            ExitStatus(code=code),
            now,
            *running[process],
            also_failed=frozenset(raised),
            failed_at=at,
            raised=code,
        )
    )
