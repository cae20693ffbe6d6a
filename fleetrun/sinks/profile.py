"""Says at the end where the profiles of recorded steps are (--profile)."""

from __future__ import annotations

import os

from fleetrun.run.events import Finished, Happening
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir.variables import PROFILE
from fleetrun.text import counted


class ProfileSink(Sink):
    """Looks for the traces of the ranks when the job has ended."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job

    def on_event(self, happening: Happening) -> None:
        """Report at the end."""
        if not isinstance(happening, Finished):
            return
        plan = self._job.plan
        paths = [
            spec.env[PROFILE].partition(":")[2] for spec in plan.processes if PROFILE in spec.env
        ]
        made = list(filter(os.path.exists, paths))
        what = "there is none: the requested steps were not run, or not in Python with Paddle"
        if made:
            others = f" and {counted(len(made) - 1, 'other')}" if len(made) > 1 else ""
            what = f"open {made[0]}{others} in https://ui.perfetto.dev"
        self._job.log(f"Profile: {what}.")
