"""Finds a rank whose exception should have ended it, while it still runs.

An exit handler, a thread, or the destructor of a device may wait forever; the other ranks then
wait for this one in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from fleetrun.model import ExitStatus, ProcessSpec
from fleetrun.postmortem import failures
from fleetrun.run import proc
from fleetrun.run.events import Exited, Overdue
from fleetrun.run.observers import ObservedJob
from fleetrun.rundir import names, rankfile, reading, variables
from fleetrun.rundir.rankfile import ErrorReport
from fleetrun.text import sentence


class RaisedRanks:
    """The running processes of a generation of JOB that have raised an exception."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        self._plan = job.plan
        # The sizes of the files in which a process could report one, and has not.
        self._without: dict[int, tuple[int, ...]] = {}

    def look(
        self, running: Mapping[int, tuple[int, int]], *, with_exits: bool
    ) -> Mapping[int, ErrorReport]:
        """Return the reports of the processes that should end by themselves, and have not.

        RUNNING has the pid and the attempt of each process. A failing sys.exit counts only
        WITH_EXITS: the script's `finally` may be at work.
        """
        raised = dict(self._reports(running))
        is_due = with_exits or any(report.code is None for report in raised.values())
        return raised if is_due else {}

    def failure(
        self, running: Mapping[int, tuple[int, int]], raised: Mapping[int, ErrorReport]
    ) -> Overdue:
        """Return the failure of the first of RUNNING that has RAISED, and log it."""
        now = time.monotonic()
        at, process = min(
            (failures.moment(report, now), process) for process, report in raised.items()
        )
        report, label = raised[process], names.label(self._plan.processes[process])
        self._job.log(
            f"{sentence(label)} {_what(report)} {now - at:.0f} s ago and has not ended; the job "
            "ends."
        )
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

    def _reports(self, running: Mapping[int, object]) -> Iterator[tuple[int, ErrorReport]]:
        """Yield the processes of RUNNING that have raised, each with its report."""
        for process in running:
            spec = self._plan.processes[process]
            sizes = _sizes(spec)
            if sizes == self._without.get(process, _NO_FILES):
                continue

            report = failures.raised(spec)
            if report is None:
                self._without[process] = sizes
            elif not proc.reads_terminal(report.pid or 0):
                # Else its user looks at the exception with a debugger.
                yield process, report


_NO_FILES = (-1, -1)


def _sizes(spec: ProcessSpec) -> tuple[int, ...]:
    paths = rankfile.path_of(spec), spec.env.get(variables.ERROR_FILE, "")
    return tuple(map(reading.size, paths))


def _what(report: ErrorReport) -> str:
    if report.code is not None:
        return f"called sys.exit({report.code})"
    return f"raised {report.class_ or 'an exception'}"
