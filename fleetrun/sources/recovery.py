"""Measures each restart: how long detecting, stopping, agreeing, starting and so on took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fleetrun.records import heartbeat, rankfile, variables
from fleetrun.run.events import (
    Exited,
    Finished,
    Gathered,
    Hung,
    JobVerdict,
    Recovered,
    RootCauses,
    SignalAll,
    Started,
    StopRequested,
    TimerExpired,
)
from fleetrun.run.observers import Source

if TYPE_CHECKING:
    from fleetrun.run.events import Happening
    from fleetrun.run.observers import ObservedJob

# Pause between two looks at ranks that start again: their imports, and their first step. What has
# taken long may take longer.
_LOOK_S, _LOOK_SHARE = 0.1, 0.02
# The shortest wait before a restart that is told; one after a host has left or come takes none.
_WAIT_S = 0.1
# What hosts agree on before that wait (whether to start again) and after it (who takes part).
_DECIDED, _AGREED = "decided", "agreed"


class Recovery(Source):
    """Declares how long each restart of JOB took, phase by phase."""

    name = "the record of restarts"
    without = "without the phases of restarts"

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        # The end of each phase in monotonic seconds, in order; the first is that of the failure.
        self._moments: dict[str, float] = {}
        self._attempt = 0
        # The processes of this attempt that have ended.
        self._ended: set[int] = set()
        self._lost_steps: int | None = None
        self._step_before: int | None = None
        self._since_ns = 0

    def on_event(self, happening: Happening) -> None:  # noqa: C901, PLR0912 - one case for each kind
        """Record when each phase ends."""
        match happening:
            case Exited(process=process, status=status, at=at, attempt=attempt) if (
                attempt == self._attempt
            ):
                self._ended.add(process)
                # Not after the end of the job, and not while others may still import.
                if status.exit_code or len(self._ended) == len(self._job.plan.processes):
                    self._conclude(at)
                if status.exit_code:
                    self._fail(at, at)
                # The last one counts, until ranks start again.
                if self._is_down():
                    self._moments["stopped"] = at
                    self._moments.pop("waited", None)
            case JobVerdict(at=at) if self._is_down():
                self._moments[_DECIDED] = at
            case TimerExpired(at=at) if self._is_down() and self._attempt:
                # The first restart waits for nothing.
                self._moments["waited"] = at
            case Hung(seconds=seconds, at=at):
                self._conclude(at)
                self._fail(at - seconds, at)
            case StopRequested(at=at):
                self._conclude(at)
                self._fail(at, at)
            case RootCauses(exits=exits):
                moments = [exited.failed_at for exited in exits if exited.failed_at is not None]
                if self._moments:
                    self._moments["failed"] = min([self._moments["failed"], *moments])
            case Gathered(attempt=attempt, at=at) if attempt:
                self._moments[_AGREED] = at
                self._attempt, self._since_ns = attempt, heartbeat.file_clock_ns()
                self._ended.clear()
            case Started(attempt=attempt, at=at) if attempt:
                self._moments["started"] = at
                self._waiting.timer("look", at + _LOOK_S, self._look)
            case SignalAll() | Finished():
                self._conclude(time.monotonic())
            case _:
                pass

    def _fail(self, failed_at: float, at: float) -> None:
        """Record the first failure of this attempt."""
        if not self._moments:
            self._moments = {"failed": failed_at, "detected": at}
            self._step_before = self._step()

    def _is_down(self) -> bool:
        """Whether this attempt has failed, and no rank has started again."""
        return bool(self._moments) and "started" not in self._moments

    def _look(self) -> None:
        """Record how far the ranks that were started again have come."""
        now = time.monotonic()
        if self._read():
            self._conclude(now)
        else:
            pause_s = max(_LOOK_S, _LOOK_SHARE * (now - self._moments["started"]))
            self._waiting.timer("look", now + pause_s, self._look)

    def _read(self) -> bool:
        """Record what the ranks have told, and return whether nothing more is to come."""
        told = [
            rankfile.progress(rankfile.path_of(spec), rankfile.restart_of(spec))
            for spec in self._job.plan.processes
        ]
        for name in rankfile.PROGRESS:
            moments = [times[name] for times in told if name in times]
            if moments:
                self._moments[name] = (min if name == rankfile.FIRST_STEP else max)(moments)
        beats = [heartbeat.beat(path, self._since_ns) for path in self._heartbeats()]
        if any(beats):
            age_s = (heartbeat.file_clock_ns() - min(filter(None, beats))) / 1e9
            self._moments.setdefault(rankfile.FIRST_STEP, time.monotonic() - max(0.0, age_s))
            self._lost_steps = self._lost()
        return rankfile.FIRST_STEP in self._moments

    def _conclude(self, at: float) -> None:
        """Declare the restart that is over, if there was one; the next failure begins another."""
        if "started" not in self._moments:
            # It has not started again yet.
            return
        self._read()
        self._waiting.timer("look", None, self._look)
        moments, self._moments = self._moments, {}
        if rankfile.IMPORTED in moments:
            # A start may be noted late.
            moments["started"] = min(moments["started"], moments[rankfile.IMPORTED])
        before = failed_at = moments.pop("failed")
        phases: dict[str, float] = {}
        for name, moment in sorted(moments.items(), key=lambda item: item[1]):
            phases[name] = max(0.0, moment - before)
            before = max(before, moment)
        if phases.get("waited", _WAIT_S) < _WAIT_S:
            phases[_AGREED] += phases.pop("waited")
        phases[_AGREED] += phases.pop(_DECIDED, 0.0)
        told = (*phases.items(),)
        recovered = Recovered(self._attempt, failed_at, told, self._lost_steps, at)
        self._lost_steps = None
        self._job.restarts.append(recovered)
        self._job.log(f"{recovered.describe()}.")
        self._declare(recovered)

    def _heartbeats(self) -> list[str]:
        paths = [spec.env.get(variables.HEARTBEAT, "") for spec in self._job.plan.processes]
        return [path for path in paths if path]

    def _step(self) -> int | None:
        """Return the last step that a rank of this attempt has reported; None without one."""
        paths = [path for path in self._heartbeats() if heartbeat.beat(path, self._since_ns)]
        return heartbeat.last_step(paths)

    def _lost(self) -> int | None:
        """Return how many steps are repeated; None where updates count from 1 in each attempt."""
        step = self._step()
        if self._step_before is None or step is None:
            return None
        if not any(heartbeat.is_scripts(path) for path in self._heartbeats()):
            return None
        return max(0, self._step_before - step + 1)
