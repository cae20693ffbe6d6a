"""`launch.txt` in the run directory: Paddle's tables of settings and environment, and our remarks.

Each later attempt adds its environment. Only the owner may read the file (mode 0600).
"""

from __future__ import annotations

from fleetrun.records import names
from fleetrun.run.events import Gathered
from fleetrun.run.observers import Chores, Sink
from fleetrun.typehints import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetrun.run.events import Happening
    from fleetrun.run.loop import Waiting
    from fleetrun.run.observers import ObservedJob

# While the ranks load their programs: at the end, this would delay the exit of a short job.
_AFTER_S = 0.02


class LaunchFile(Sink):
    """Writes the full banner, even if the console shows a shorter one."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        self._first = job.plan

    def open(self, waiting: Waiting) -> None:
        """Write a little after the ranks have started."""
        self._chores = Chores(waiting)
        self._chores.add("launch file", self._job.late_s(_AFTER_S), self._write_first)

    def on_event(self, happening: Happening) -> None:
        """Add the environment of another attempt, which has other ports."""
        if isinstance(happening, Gathered) and happening.attempt:
            from fleetrun.plan import render

            self._chores.finish()
            self._append(render.again(happening.plan))

    def close(self) -> None:
        """Write the file now if the launch ended before the timer."""
        self._chores.finish()

    def _write_first(self) -> None:
        from fleetrun.plan import render  # no start waits for it

        notes = "".join(f"fleetrun: {note}\n" for note in self._first.notes)
        banner = render.banner(self._job.request, self._first, has_links=self._job.has_links)
        self._append(banner + notes)

    def _append(self, text: str) -> None:
        self._job.folder.add(names.LAUNCH, self._job.redact(text))
