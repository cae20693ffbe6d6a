"""Reports at the end where the time of recorded steps went (--profile)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.records import names
from fleetrun.records.variables import PROFILE
from fleetrun.run.events import Finished
from fleetrun.run.observers import Sink

if TYPE_CHECKING:
    from fleetrun.run.events import Happening
    from fleetrun.run.observers import ObservedJob

# More lines would say nothing new.
_MOST = 4


class ProfileSink(Sink):
    """Reads the traces of the ranks when the job has ended."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job

    def on_event(self, happening: Happening) -> None:
        """Report at the end."""
        if not isinstance(happening, Finished):
            return
        from fleetrun.records import tracefile  # imported late: the start has priority

        records, silent, path = [], [], ""
        for spec in self._job.plan.processes:
            if PROFILE not in spec.env:
                continue
            path = path or spec.env[PROFILE].partition(":")[2]
            record = tracefile.read(spec.env[PROFILE].partition(":")[2])
            if record is None:
                silent.append(names.label(spec))
            else:
                records.append(record)
        for record in records[:_MOST]:
            self._job.log(f"Profile of {record.reported()}.")
        if len(records) > _MOST:
            self._job.log(f"Profile: {len(records) - _MOST} more ranks have left traces.")
        if records:
            self._job.log(f"Profile: open {path} and others in https://ui.perfetto.dev.")
        if silent:
            self._job.log(
                f"Profile: no trace of {names.listed(silent)}: the requested steps were not run, "
                "or not in Python with Paddle."
            )
