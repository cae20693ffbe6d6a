"""The run directory of a background head, by which `ps`, `attach` and `stop` find it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from fleetrun.errors import EnvironmentFault
from fleetrun.model import Request
from fleetrun.plan import planner
from fleetrun.run.background import Background
from fleetrun.run.events import signal_name
from fleetrun.rundir import eventfile, lockfile, names
from fleetrun.rundir.folder import Folder


class HeadRun:
    """The record of REQUEST's job that a head in BACKGROUND keeps."""

    def __init__(self, background: Background, request: Request) -> None:
        self._background = background
        self._job_id = request.job_id
        self._log_dir = os.path.abspath(request.log_dir)
        started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        # If the head is one of the hosts, its launcher has a run of its own.
        self._name = f"{planner.run_name(request, started, os.getpid())}-head"
        self._events = -1

    def begin(self, log: Callable[[str], None]) -> None:
        """Keep the console, LOG how to attach to the job, and let the foreground process exit.

        Raises EnvironmentFault if the console cannot be written.
        """
        try:
            self._folder = Folder(os.path.join(self._log_dir, names.RUNS, self._name))
            os.makedirs(self._folder.path)
            self._lock = lockfile.hold(self._folder, os.getpid())
            self._events = self._folder.append(names.EVENTS)
            self._note(
                "launched",
                job_id=self._job_id,
                mode="head",
                engine="ssh",
                generation=0,
                node_rank=0,
                processes=0,
                launcher_pid=os.getpid(),
            )
            self._background.sink(self._folder, log, os.getpid()).prepare()
        except OSError as error:
            raise EnvironmentFault(names.unwritable(self._log_dir, error.strerror)) from None
        self._background.announce()

    def end(self, code: int, signum: int | None) -> None:
        """Record the exit CODE of the job, and the signal SIGNUM that has ended it, if any."""
        if self._events < 0:
            return
        verdict = f"interrupted by {signal_name(signum)}" if signum else f"exit code {code}"
        # On a full disk, the exit code still tells.
        with suppress(OSError):
            self._note(
                "finished", exit_code=code, verdict=verdict, attempts=1, given_up=None, stuck=[]
            )
        os.close(self._events)
        os.close(self._lock)

    def _note(self, event: str, **fields: eventfile.Value) -> None:
        eventfile.append(self._events, event, time.monotonic(), fields)
