"""--detach: the launcher runs on in a session of its own, with its console in a file."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

from fleetrun.errors import EnvironmentFault, shell_code
from fleetrun.run.keeper import hold_standard
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import ObservedJob, Sink
from fleetrun.rundir import names

_READY = b"."


class Background(Sink):
    """JOB in the background, with the file CONSOLE for its console.

    The foreground process exits at a byte on the descriptor READY: all processes are started.
    """

    def __init__(self, job: ObservedJob, console: str, ready: int) -> None:
        self._job, self._console, self._ready = job, console, ready

    def prepare(self) -> None:
        """Move the console into the run directory; open descriptors stay valid."""
        os.rename(self._console, os.path.join(self._job.folder.path, names.CONSOLE))

    def open(self, waiting: Waiting) -> None:
        """Announce the job in the next turn, when the log folder's names point to this launch."""
        waiting.timer("announce", time.monotonic(), self._announce)

    def _announce(self) -> None:
        pid = self._job.pid
        self._job.log(
            f"running in the background as process {pid}: `fleetrun attach {pid}` shows its "
            f"console, `fleetrun stop {pid}` ends it."
        )
        os.write(self._ready, _READY)
        os.close(self._ready)


def begin(log_dir: str) -> tuple[str, int] | int:
    """Fork; return console and READY in the child, whose console begins as a file in LOG_DIR.

    In the parent, return the exit code once the child's processes are started or it has ended.
    """
    hold_standard()
    console = os.path.join(log_dir, f".console.{os.getpid()}")
    try:
        os.makedirs(log_dir, exist_ok=True)
        file = os.open(console, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except OSError as error:
        raise EnvironmentFault(names.unwritable(log_dir, error.strerror)) from None
    ready, write_fd = os.pipe()
    child = os.fork()
    if not child:
        os.close(ready)
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(file)
        return console, write_fd
    os.close(write_fd)
    is_ready = False
    try:
        # The pipe is closed when the child has ended.
        is_ready = os.read(ready, 1) == _READY
    except KeyboardInterrupt:
        os.kill(child, signal.SIGTERM)
    code = 0 if is_ready else shell_code(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if sys.stderr is not None:
        # Not `read`, as the child shares the position.
        sys.stderr.buffer.write(os.pread(file, os.fstat(file).st_size, 0))
        sys.stderr.flush()
    if not is_ready:
        # A job that never began leaves no file behind.
        with suppress(FileNotFoundError):
            os.unlink(console)
    return code
