"""Collects what the closing line and the notifications say about the end of the job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fleetrun.records import variables
from fleetrun.run.events import Finished, Gathered
from fleetrun.run.observers import Sink

if TYPE_CHECKING:
    from fleetrun.model import LaunchPlan
    from fleetrun.postmortem.ending import Ending
    from fleetrun.run.events import Happening, Outcome


class EndingSink(Sink):
    """Keeps the last plan, the outcome and the last step; `ending` is there after the end."""

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._began = time.time()
        self._began_at = time.monotonic()
        self.ending: Ending | None = None

    def on_event(self, happening: Happening) -> None:
        """Keep each plan, and the end."""
        if isinstance(happening, Gathered):
            self._plan = happening.plan
        elif isinstance(happening, Finished):
            self.ending = self._made(happening.outcome, happening.at)

    def _made(self, outcome: Outcome, at: float) -> Ending:
        from fleetrun.postmortem.ending import Ending  # starting goes first
        from fleetrun.records.heartbeat import read_step

        steps = [read_step(spec.env.get(variables.HEARTBEAT, "")) for spec in self._plan.processes]
        reported = [step for step in steps if step is not None]
        return Ending(
            outcome, self._plan, at - self._began_at, self._began, max(reported, default=None)
        )

    def line(self) -> str:
        """Return the line with which the launch closes; nothing before the end."""
        from fleetrun.postmortem import ending

        return "" if self.ending is None else ending.line(self.ending)
