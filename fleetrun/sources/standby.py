"""Keeps a process with Paddle imported ready while ranks train, to restart them from it.

It is started once the ranks have imported Paddle, so it does not slow down the launch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fleetrun.run import forkserver, proc
from fleetrun.run.events import Exited, Gathered, RunWarning, SignalAll, Started
from fleetrun.run.observers import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.model import LaunchPlan
    from fleetrun.run.events import Declared, Happening
    from fleetrun.run.forkserver import ServerState
    from fleetrun.run.loop import Waiting
    from fleetrun.run.observers import ObservedJob
    from fleetrun.supervisor import Supervisor

# The pause between two looks at the ranks, and how long after their import the server starts.
_LOOK_S = 1.0
_CALM_S = 2.0


class StandBy(Source):
    """Starts the fork server of JOB, once, and reports whether it works."""

    name = "the fork server"
    without = "and starts later ranks without it"

    def __init__(self, job: ObservedJob, supervisor: Supervisor) -> None:
        self._job, self._supervisor = job, supervisor
        self._take(job.plan)
        self._pids: dict[int, int] = {}
        self._calm_since: float | None = None
        # A host that has waited for its place has begun there.
        self._is_begun = supervisor.stands_by
        self._told = ""

    def open(self, waiting: Waiting, declare: Callable[[Declared], None]) -> None:
        """Begin to look at the ranks, after a pause."""
        super().open(waiting, declare)
        waiting.timer("look", time.monotonic() + _LOOK_S, self._look)

    def on_event(self, happening: Happening) -> None:
        """Track which processes run."""
        match happening:
            case Gathered(attempt=attempt, plan=plan) if attempt:
                self._take(plan)
                self._waiting.timer("look", time.monotonic() + _LOOK_S, self._look)
            case Started(process=process, pid=pid):
                self._pids[process] = pid
            case Exited(process=process):
                self._pids.pop(process, None)
            case SignalAll():
                self._calm_since = None
            case _:
                pass

    def _take(self, plan: LaunchPlan) -> None:
        self._pythons = forkserver.forkable(plan)

    def _look(self) -> None:
        now = time.monotonic()
        if not self._is_calm(now):
            self._waiting.timer("look", now + _LOOK_S, self._look)
            return
        if not self._is_begun:
            self._is_begun = True
            like, count = self._job.plan.processes[self._pythons[0]], len(self._pythons)
            self._supervisor.stand_by(like, self._job.request.preload, count)
        self._supervisor.await_server(self._waiting, self._tell)

    def _is_calm(self, now: float) -> bool:
        """Whether all ranks have had Paddle loaded for a while."""
        pids = [self._pids.get(process, 0) for process in self._pythons]
        if not pids or not all(pids) or not all(map(proc.has_paddle, pids)):
            self._calm_since = None
            return False
        self._calm_since = self._calm_since or now
        return now - self._calm_since >= _CALM_S

    def _tell(self, server: ServerState) -> None:
        """Declare once whether ranks can be forked."""
        if server.state != self._told:
            self._told = server.state
            self._declare(RunWarning("fork server", str(server), time.monotonic()))
