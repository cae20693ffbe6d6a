"""`launch.txt` in the run directory: Paddle's tables of settings and environment, and our remarks.

Each later attempt adds its environment. Only the owner may read the file (mode 0600).
"""

from __future__ import annotations

from fleetrun.plan import render
from fleetrun.run.events import Gathered, Happening
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import names


class LaunchFile(Sink):
    """Writes the full banner, even if the console shows a shorter one."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job

    def open(self, waiting: Waiting) -> None:  # noqa: ARG002 - the protocol's
        """Write the banner and the notes."""
        plan = self._job.plan
        notes = "".join(f"fleetrun: {note}\n" for note in plan.notes)
        banner = render.banner(self._job.request, plan, has_links=self._job.has_links)
        self._append(banner + notes)

    def on_event(self, happening: Happening) -> None:
        """Add the environment of another attempt, which has other ports."""
        if isinstance(happening, Gathered) and happening.attempt:
            self._append(render.again(happening.plan))

    def _append(self, text: str) -> None:
        self._job.folder.add(names.LAUNCH, self._job.redact(text))
