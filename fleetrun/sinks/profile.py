"""Says at the end where the profiles of recorded steps are (--profile)."""

from __future__ import annotations

import os

from fleetrun.run.events import Finished, Happening
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import names
from fleetrun.rundir.variables import PROFILE


class ProfileSink(Sink):
    """Looks for the traces of the ranks when the job has ended."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job

    def on_event(self, happening: Happening) -> None:
        """Report at the end."""
        if not isinstance(happening, Finished):
            return
        paths = {
            names.label(spec): spec.env[PROFILE].partition(":")[2]
            for spec in self._job.plan.processes
            if PROFILE in spec.env
        }
        silent = [label for label, path in paths.items() if not os.path.exists(path)]
        if len(silent) < len(paths):
            path = next(path for label, path in paths.items() if label not in silent)
            others = " and others" if len(paths) - len(silent) > 1 else ""
            self._job.log(f"Profile: open {path}{others} in https://ui.perfetto.dev.")
        if silent:
            self._job.log(
                f"Profile: no trace of {names.listed(silent)}: the requested steps were not run, "
                "or not in Python with Paddle."
            )
