"""The launcher that a Python program starts by `fleetrun.launch`; it reports through a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from fleetrun.cli import app
from fleetrun.errors import FleetrunError
from fleetrun.model import LaunchPlan
from fleetrun.run.events import Finished, Happening
from fleetrun.run.observers import Sink

# fcntl(2); Python has no name for it.
_F_SETSIG = 10


class Reports(Sink):
    """Reports to the caller of the job, one JSON object per line, as long as it listens."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._run_dir = self._verdict = ""

    def gathering(self) -> None:
        """Report that this host is fine, and that other hosts are waited for."""
        self._report("gathering")

    def sink(self, plan: LaunchPlan) -> Sink:
        """Return the sink that reports the start of PLAN, and keeps the verdict."""
        self._run_dir = os.path.normpath(os.path.join(plan.cwd, plan.run_dir))
        return self

    def open(self, waiting: object) -> None:  # noqa: ARG002 - nothing to wait for
        """Report that the ranks run."""
        self._report("began", run_dir=self._run_dir)

    def on_event(self, happening: Happening) -> None:
        """Keep the verdict of the job's end."""
        if isinstance(happening, Finished):
            self._verdict = happening.outcome.describe()

    def failed(self, error: FleetrunError, message: str) -> None:
        """Report why there is no job."""
        kind, code = type(error).__name__, error.exit_code
        self._report("failed", kind=kind, message=message, exit_code=code)

    def ended(self, code: int) -> None:
        """Report the end of the job."""
        verdict = self._verdict or ("all is done" if code == 0 else f"it ended with {code}")
        self._report("ended", exit_code=code, verdict=verdict)

    def _report(self, report: str, **more: str | int) -> None:
        # A signal announces the end of the caller.
        with suppress(BrokenPipeError):
            os.write(self._fd, json.dumps({"report": report, **more}).encode() + b"\n")


def run() -> NoReturn:
    """Run the launcher with the words after our two descriptors, and end this process."""
    report_to, lifeline, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    sys.argv = ["fleetrun", *words]
    for fd in (report_to, lifeline):
        os.set_inheritable(fd, False)  # noqa: FBT003 - os has it so
    # A thread of the caller may have blocked these signals, and a notebook ignores them.
    for signum, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        signal.signal(signum, usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _end_with_caller(lifeline)
    reports = Reports(report_to)
    code = app.main(words, caller=reports)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):
            stream.flush()
    reports.ended(code)
    os._exit(code)


def _end_with_caller(lifeline: int) -> None:
    """Get SIGTERM when the caller, which has the other end of LIFELINE, is gone."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        signal.raise_signal(signal.SIGTERM)
