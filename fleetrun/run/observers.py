"""Observers of a job: sinks show or record it and may fail, sources feed the policy."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from fleetrun.model import LaunchPlan, Request
from fleetrun.run.events import (
    Declared,
    Happening,
    Outcome,
    Recovered,
    SourceFailed,
    Started,
)
from fleetrun.run.keeper import Keeper
from fleetrun.run.loop import Loop, LoopShare, Waiting
from fleetrun.rundir import names
from fleetrun.rundir.folder import Folder


class Caller(Protocol):
    """The Python program that started the launcher and follows its job."""

    def report(self, **report: str) -> None:
        """Learn of an error and its message; of nothing: this host waits for the others."""

    def sink(self, plan: LaunchPlan) -> Sink:
        """Return the sink that follows the job of PLAN."""
        ...


class Sink:
    """Observes a job and shows or records it. It may fail without hurting the job."""

    def prepare(self) -> None:
        """Prepare before anything starts; a FleetrunError means that nothing is started."""

    def withdraw(self) -> None:
        """Undo what was prepared: nothing is started."""

    def open(self, waiting: Waiting) -> None:
        """Begin, before the first process starts."""
        self._waiting = waiting

    def on_event(self, happening: Happening) -> None:
        """Handle what happened or was done; Gathered is the first, Finished the last."""

    def is_busy(self) -> bool:
        """Whether something is still to be written after Finished."""
        return False

    def shows(self, process: int) -> bool:  # noqa: ARG002 - for those that override it
        """Whether the user has seen all output of PROCESS."""
        return False

    def close(self) -> None:
        """End."""


class Source(Sink):
    """Observes a job and feeds the policy by `declare`, from `open` on.

    The failure of one that `is_required` ends the job with its `exit_code`.
    """

    name = "a source"
    is_required = False
    exit_code = 1
    declare: Callable[[Declared], None]


class ObservedJob:
    """A job, which the supervisor and all observers share.

    `log` prints a line of the launcher, `show` a longer text; `redact` removes secrets.
    """

    # The current generation's.
    plan: LaunchPlan
    folder: Folder
    # When the first plan was made: seconds since the epoch, and monotonic seconds.
    began = began_at = 0.0

    def __init__(
        self,
        request: Request,
        environ: Mapping[str, str],
        *,
        log: Callable[[str], None],
        show: Callable[[str], None] | None = None,
        redact: Callable[[str], str] = str,
        keeper: Keeper | None = None,
    ) -> None:
        self.request, self.environ = request, environ
        self.log, self.show, self.redact = log, show or log, redact
        # None: nothing is started.
        self.keeper = keeper
        self.restarts: list[Recovered] = []

    @property
    def pid(self) -> int:
        """The process that the user has started."""
        return os.getpid() if self.keeper is None else self.keeper.pid

    def begin(self, plan: LaunchPlan) -> None:
        """Take the first plan."""
        self.plan = plan
        self.folder = Folder(os.path.normpath(os.path.join(plan.cwd, plan.run_dir)))
        self.began, self.began_at = time.time(), time.monotonic()

    def logs(self, started: Started) -> tuple[str, ...]:
        """Return the paths of the output of a process of the current plan that has STARTED."""
        return names.log_paths(self.plan, self.plan.processes[started.process], started.attempt)

    def observing(self) -> Sequence[Sink]:
        """Return new observers of the job, sinks first."""
        return ()

    def closing(self, outcome: Outcome, at: float) -> str:  # noqa: ARG002 - for those that override it
        """Return the last line of a job that has ended AT; empty: none."""
        return ""

    def shown(self, plan: LaunchPlan) -> tuple[int, ...]:
        """Return which processes of PLAN the console shows: --tee's ranks, or the first one."""
        ranks, trainers = self.request.tee, plan.trainers
        if ranks == "all":
            return tuple(range(len(plan.processes)))
        if not ranks:
            # A host may have servers only.
            return tuple(trainers.values())[:1] or (0,)
        chosen = set(map(int, ranks.split(",")))
        return tuple(index for rank, index in trainers.items() if rank in chosen)


class Observers:
    """All observers of JOB. DECLARE takes the sources' reports; an observer that fails is closed.

    Sinks come first, so that they see an exit before any conclusion from it.
    """

    def __init__(self, job: ObservedJob, declare: Callable[[Declared], None]) -> None:
        self._job, self._declare = job, declare
        self._prepared: list[Sink] = []
        # Those that are open.
        self._shares: dict[Sink, LoopShare] = {}
        self._warned: set[str] = set()

    def prepare(self, plan: LaunchPlan) -> None:
        """Prepare all for the first PLAN; a FleetrunError means that nothing can be started."""
        self._job.begin(plan)
        self._prepared = list(self._job.observing())
        for observer in self._prepared:
            observer.prepare()

    def withdraw(self) -> None:
        """Undo what was prepared, the last first."""
        while self._prepared:
            self._prepared.pop().withdraw()

    def open(self, loop: Loop) -> None:
        """Open all that are prepared."""
        while self._prepared:
            observer = self._prepared.pop(0)
            share = self._shares[observer] = LoopShare(loop, partial(self._shielded, observer))
            if isinstance(observer, Source):
                observer.declare = self._declare
            self._shielded(observer, partial(observer.open, share))

    def on_event(self, happening: Happening) -> None:
        """Notify all that are open."""
        for observer in list(self._shares):
            self._shielded(observer, partial(observer.on_event, happening))

    def close(self) -> None:
        """Close all; the one that prints messages was opened first and is closed last."""
        for observer in reversed(list(self._shares)):
            self._shielded(observer, observer.close)

    def is_busy(self) -> bool:
        """Whether any still has something to write."""
        return any(observer.is_busy() for observer in self._shares)

    def shows(self, process: int) -> bool:
        """Whether the user has seen all output of PROCESS."""
        return any(observer.shows(process) for observer in self._shares)

    def _shielded(self, observer: Sink, call: Callable[[], None]) -> None:
        """Make CALL; an exception ends a sink with a warning, and is an event if of a source."""
        try:
            if observer in self._shares:
                call()
        except Exception as error:  # noqa: BLE001 - as said above
            if (share := self._shares.pop(observer, None)) is None:
                return
            share.clear()
            why = (error.strerror if isinstance(error, OSError) else "") or repr(error)
            name = re.sub(r"\B(?=[A-Z])", " ", type(observer).__name__).lower().lstrip("_ ")
            if isinstance(observer, Source):
                # The other hosts must notice that this one no longer answers.
                with suppress(Exception):
                    observer.close()
                name, how = observer.name, (observer.is_required, observer.exit_code)
                self._declare(SourceFailed(name, why, time.monotonic(), *how))
                if observer.is_required:
                    return
            # One full disk that fails several sinks is one warning.
            if why not in self._warned:
                self._warned.add(why)
                self._job.log(f"{name.capitalize()} failed ({why}); the job goes on without it.")
