"""--detach: the launcher runs on in a session of its own, with its console in a file."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from fleetrun.errors import EnvironmentFault, shell_code
from fleetrun.run.keeper import hold_standard
from fleetrun.run.loop import Waiting
from fleetrun.run.observers import Sink
from fleetrun.rundir import names
from fleetrun.rundir.folder import Folder

_READY = b"."


class Background(Sink):
    """The launcher in the background, with the file CONSOLE for its console.

    The foreground process waits for a byte on the descriptor READY and then exits; it is sent when
    all processes have been started.
    """

    def __init__(self, console: str, ready: int) -> None:
        self._console = console
        self._ready = ready

    def sink(self, folder: Folder, log: Callable[[str], None], pid: int) -> Sink:
        """Return the sink that moves the console into FOLDER and logs how to attach to PID."""
        self._folder, self._log, self._pid = folder, log, pid
        return self

    def prepare(self) -> None:
        """Move the console into the run directory; open descriptors stay valid."""
        os.rename(self._console, os.path.join(self._folder.path, names.CONSOLE))

    def open(self, waiting: Waiting) -> None:
        """Announce the job in the next turn, when all observers know of its processes."""
        # Only then do the names in the log folder point to this launch.
        waiting.timer("announce", time.monotonic(), self.announce)

    def close(self) -> None:
        """Announce a job that has ended before that."""
        if self._ready >= 0:
            self.announce()

    def announce(self) -> None:
        """Print how to attach to the job, and let the foreground process exit."""
        pid = self._pid
        self._log(
            f"running in the background as process {pid}: `fleetrun attach {pid}` shows its "
            f"console, `fleetrun stop {pid}` ends it."
        )
        if self._ready >= 0:
            os.write(self._ready, _READY)
            os.close(self._ready)
            self._ready = -1


def begin(log_dir: str) -> Background | int:
    """Fork; return the Background in the child, whose console begins as a file in LOG_DIR.

    In the parent, return the exit code once the child's processes are started or it has ended.
    """
    hold_standard()
    console = os.path.join(log_dir, f".console.{os.getpid()}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    try:
        os.makedirs(log_dir, exist_ok=True)
        file = os.open(console, flags, 0o600)
    except OSError as error:
        raise EnvironmentFault(names.unwritable(log_dir, error.strerror)) from None
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child:
        os.close(write_fd)
        return _watch(child, read_fd, file, console)
    os.close(read_fd)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (file, 1), (file, 2)):
        os.dup2(source, target, inheritable=True)
    os.close(null)
    os.close(file)
    return Background(console, write_fd)


def _watch(child: int, ready: int, file: int, console: str) -> int:
    """Wait until CHILD reports on READY or ends; print its console and return the exit code."""
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
