"""Reports from which checkpoint ranks resume, and whether they write one when stopped."""

from __future__ import annotations

import time

from fleetrun.host import checkpoints
from fleetrun.model import Checkpoints
from fleetrun.run.events import Exited, Gathered, Happening, RunWarning, SignalAll
from fleetrun.run.observers import ObservedJob, Source
from fleetrun.rundir import heartbeat

_KILL = 9
# The longest tick of the clock of files.
_TICK_NS = 10_000_000
# The most incomplete checkpoints that are named.
_NAMED = 3


class Resumption(Source):
    """Watches the checkpoints of JOB in FOLDER."""

    name = "the watch over checkpoints"
    without = "without reports on checkpoints"

    def __init__(self, job: ObservedJob, folder: str) -> None:
        self._job, self._folder = job, folder
        # When the last event was, when the ranks were asked to end, and how many still run.
        self._event_ns = 0
        self._asked_ns: int | None = None
        self._alive = 0

    def on_event(self, happening: Happening) -> None:
        """Report what the ranks resume from, and what they leave."""
        match happening:
            case Gathered(plan=plan):
                self._asked_ns, self._alive = None, len(plan.processes)
                if plan.checkpoints is not None:
                    self._say(_given(plan.checkpoints, self._folder))
            case SignalAll(signum=signum) if signum != _KILL and self._asked_ns is None:
                # They may have saved already; the event for which they were asked comes before.
                self._asked_ns = self._event_ns - _TICK_NS
            case Exited():
                self._alive -= 1
                if not self._alive and self._asked_ns is not None:
                    self._say(self._left(self._asked_ns))
                    self._asked_ns = None
            case _:
                pass
        self._event_ns = heartbeat.file_clock_ns()

    def _left(self, asked_ns: int) -> str:
        """Report whether a checkpoint was written after the ranks were asked to stop."""
        state = checkpoints.find(self._folder, is_alone=len(self._job.plan.nodes) == 1)
        if state.newest is not None and state.written_ns >= asked_ns:
            return f"After they were asked to stop, ranks wrote {state.newest}."
        when = "" if state.newest is None else f"; the last one, {state.newest}, is older"
        return f"No complete checkpoint was written after ranks were asked to stop{when}."

    def _say(self, text: str) -> None:
        self._job.log(text)
        self.declare(RunWarning("checkpoint", text, time.monotonic()))


def _given(checkpoints: Checkpoints, folder: str) -> str:
    """Report from which checkpoint ranks resume.

    >>> from fleetrun.model import Checkpoints
    >>> _given(Checkpoints("out/checkpoint-7", 1, (("out/checkpoint-8", "it is empty"),)), "out")
    'Resuming from out/checkpoint-7. Incomplete, and ignored: out/checkpoint-8 (it is empty).'
    >>> _given(Checkpoints(has_folder=False), "out")
    'Starting from scratch: there is no folder out yet.'
    """
    text = f"Resuming from {checkpoints.newest}."
    if checkpoints.newest is None:
        in_folder = f"complete checkpoint in {folder}"
        what = in_folder if checkpoints.has_folder else f"folder {folder} yet"
        text = f"Starting from scratch: there is no {what}."
    partial = [f"{path} ({why})" for path, why in checkpoints.partial[:_NAMED]]
    if len(checkpoints.partial) > _NAMED:
        partial.append(f"{len(checkpoints.partial) - _NAMED} more")
    return f"{text} Incomplete, and ignored: {', '.join(partial)}." if partial else text
