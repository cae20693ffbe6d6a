"""Reports from which checkpoint the ranks of each attempt resume."""

from __future__ import annotations

import time

from fleetrun.run.events import Gathered, Happening, RunWarning
from fleetrun.run.observers import ObservedJob, Source


class Resumption(Source):
    """Reports the checkpoints of JOB in FOLDER."""

    name = "the report on checkpoints"

    def __init__(self, job: ObservedJob, folder: str) -> None:
        self._job, self._folder = job, folder

    def on_event(self, happening: Happening) -> None:
        """Report what the ranks resume from, and which checkpoints are ignored."""
        if not isinstance(happening, Gathered) or happening.plan.checkpoints is None:
            return
        known, folder = happening.plan.checkpoints, self._folder
        text = f"Starting from scratch: there is no complete checkpoint in {folder}."
        if known.newest is not None:
            text = f"Resuming from {known.newest}."
        if known.partial:
            partial = ", ".join(f"{path} ({why})" for path, why in known.partial)
            text += f" Incomplete, and ignored: {partial}."
        self._job.log(text)
        self.declare(RunWarning("checkpoint", text, time.monotonic()))
