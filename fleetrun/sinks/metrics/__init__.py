"""Starts the process that measures the job for `metrics.jsonl` and `--metrics_port`.

It is a separate process so that neither a slow driver nor a scrape delays the launcher. It starts
some seconds after the ranks.
"""

from __future__ import annotations

import _socket  # `socket` takes 40 ms to import, this one 1
import os
import signal
import sys
import time
from contextlib import suppress
from importlib.util import find_spec

from fleetrun.errors import EnvironmentFault
from fleetrun.run import itself
from fleetrun.run.events import Finished, Happening
from fleetrun.run.loop import Waiting, poll
from fleetrun.run.observers import ObservedJob, Sink

# A shorter job has no metrics; with --metrics_port they begin sooner.
_AFTER_S = 5.0
_SOON_S = 0.5
# SIGKILL takes effect by then, even on a busy host.
_END_S = 3.0


class Metrics(Sink):
    """Measures the job every --metrics_period, and serves OpenMetrics at --metrics_port."""

    def __init__(self, job: ObservedJob) -> None:
        self._job = job
        self._period_s, self._port = job.request.metrics_period_s, job.request.metrics_port
        self._pid = 0
        self._pidfd = -1

    def prepare(self) -> None:
        """Try the port; if it is in use, warn and go on, as a job does not need metrics.

        Raises EnvironmentFault if prometheus-client is not installed.
        """
        if self._port is None:
            return
        if find_spec("prometheus_client") is None:
            raise EnvironmentFault(
                "--metrics_port needs prometheus-client, which is not installed here: "
                f"{sys.executable} -m pip install prometheus-client."
            )
        tried = _socket.socket()
        tried.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", self._port))
        except OSError as error:
            self._job.log(
                f"--metrics_port={self._port} cannot be used ({error.strerror}): the metrics of "
                "this job are not served, metrics.jsonl has them."
            )
            self._port = None
        tried.close()

    def open(self, waiting: Waiting) -> None:
        """Schedule the start of the measuring process."""
        super().open(waiting)
        after = min(self._period_s, _AFTER_S if self._port is None else _SOON_S)
        waiting.timer("begin", time.monotonic() + after, self._begin)

    def on_event(self, happening: Happening) -> None:
        """End with the job."""
        if isinstance(happening, Finished):
            self._kill()

    def close(self) -> None:
        """Kill the process; do not wait for one that is stuck in a driver."""
        self._kill()
        if self._pidfd < 0:
            return
        poll(_END_S, self._pidfd)
        self._forget()

    def _begin(self) -> None:
        fds = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        words = (self._job.folder.path, os.getpid(), self._period_s, self._port)
        code = f"from fleetrun.sinks.metrics import measure; measure.main{words!r}"
        self._pid = os.posix_spawn(
            sys.executable,
            itself.command(code),
            os.environ,
            file_actions=fds,
            # A scheduler signals every process of a job; this one ends with the launcher.
            setsigmask=signal.valid_signals(),
        )
        self._pidfd = os.pidfd_open(self._pid)
        self._waiting.watch(self._pidfd, self._on_end)

    def _on_end(self) -> None:
        self._forget()
        self._job.log(
            "The process that measures the job has ended; the job goes on without metrics."
        )

    def _kill(self) -> None:
        self._waiting.timer("begin", None, self._begin)
        if self._pidfd >= 0:
            self._waiting.unwatch(self._pidfd)
            with suppress(ProcessLookupError):
                # Alone, as it is in our group.
                os.kill(self._pid, signal.SIGKILL)

    def _forget(self) -> None:
        self._waiting.unwatch(self._pidfd)
        # The supervisor, which reaps orphans, may be faster; or the process is still stuck in a
        # driver.
        with suppress(ChildProcessError):
            os.waitpid(self._pid, os.WNOHANG)
        os.close(self._pidfd)
        self._pidfd = -1
