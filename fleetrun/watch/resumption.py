"""Reports from which checkpoint the ranks of each attempt resume."""

from __future__ import annotations

import time

from fleetrun.model import Checkpoints
from fleetrun.run.events import Gathered, Happening, RunWarning
from fleetrun.run.observers import ObservedJob, Source


class Resumption(Source):
    """Reports the checkpoints of JOB in FOLDER."""

    name = "the report on checkpoints"

    def __init__(self, job: ObservedJob, folder: str) -> None:
        self._job, self._folder = job, folder

    def on_event(self, happening: Happening) -> None:
        """Report what the ranks resume from."""
        if isinstance(happening, Gathered) and happening.plan.checkpoints is not None:
            text = _given(happening.plan.checkpoints, self._folder)
            self._job.log(text)
            self.declare(RunWarning("checkpoint", text, time.monotonic()))


def _given(checkpoints: Checkpoints, folder: str) -> str:
    """Report from which checkpoint ranks resume.

    >>> from fleetrun.model import Checkpoints
    >>> _given(Checkpoints("out/checkpoint-7", (("out/checkpoint-8", "it is empty"),)), "out")
    'Resuming from out/checkpoint-7. Incomplete, and ignored: out/checkpoint-8 (it is empty).'
    >>> _given(Checkpoints(has_folder=False), "out")
    'Starting from scratch: there is no folder out yet.'
    """
    what = f"complete checkpoint in {folder}" if checkpoints.has_folder else f"folder {folder} yet"
    text = f"Starting from scratch: there is no {what}."
    if checkpoints.newest is not None:
        text = f"Resuming from {checkpoints.newest}."
    partial = [f"{path} ({why})" for path, why in checkpoints.partial]
    return f"{text} Incomplete, and ignored: {', '.join(partial)}." if partial else text
