"""`--ui`: `fleetrun top` on the launcher's own terminal, until the job ends.

It runs as a separate process. The launcher's lines are held back until it has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fleetrun.run import itself
from fleetrun.run.events import Finished, Interrupted
from fleetrun.run.loop import poll
from fleetrun.run.observers import Sink

if TYPE_CHECKING:
    from fleetrun.run.events import Happening
    from fleetrun.run.loop import Waiting
    from fleetrun.run.observers import ObservedJob
    from fleetrun.sinks.stderr import Messages

# How long the last table may take when the job is over.
_TIMEOUT_S = 5.0
_END_S = 1.0
# By then the launcher, too, has received the signal that ended the screen.
_HEARD_S = 0.2
# Restores the ordinary screen and the cursor.
_BACK = b"\x1b[?1049l\x1b[?25h"


class Screen(Sink):
    """Shows the job, and holds MESSAGES back meanwhile."""

    def __init__(self, job: ObservedJob, messages: Messages) -> None:
        self._job = job
        self._messages = messages
        self._is_over = False
        self._is_interrupted = False
        self._pidfd = -1
        self._settings: list[Any] | None = None

    def open(self, waiting: Waiting) -> None:
        """Take the terminal."""
        self._waiting = waiting
        with suppress(termios.error):
            self._settings = termios.tcgetattr(1)
        words = f"['fleetrun', 'top', {self._job.folder.path!r}]"
        code = f"sys.argv[:] = {words}; from fleetrun.__main__ import run; run()"
        # In our process group, as it reads the keyboard and Ctrl-C ends both; and in our session,
        # so that it does not count as part of the job.
        pid = os.posix_spawn(
            sys.executable,
            itself.command(code),
            os.environ,
            setsigmask=(),
            setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        )
        self._pidfd = os.pidfd_open(pid)
        self._messages.hold()
        waiting.watch(self._pidfd, self._on_end)

    def on_event(self, happening: Happening) -> None:
        """When the job is over, wait for the last table."""
        if isinstance(happening, Interrupted):
            self._is_interrupted = True
        if isinstance(happening, Finished):
            self._is_over = True
            if self._pidfd >= 0:
                self._waiting.timer("timeout", time.monotonic() + _TIMEOUT_S, self._kill)

    def is_busy(self) -> bool:
        """Whether the last table is still to be shown."""
        return self._is_over and self._pidfd >= 0

    def close(self) -> None:
        """Stop it, and restore the terminal."""
        if self._pidfd >= 0:
            self._kill()
            poll(_END_S, self._pidfd)
            self._on_end()

    def _kill(self) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _on_end(self) -> None:
        """Restore the terminal and write the lines that were held back."""
        self._waiting.unwatch(self._pidfd)
        self._waiting.timer("timeout", None, self._kill)
        code = None
        # The supervisor, which reaps orphans, may have been faster.
        with suppress(ChildProcessError):
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            if ended is not None and ended.si_code == os.CLD_EXITED:
                code = ended.si_status
        os.close(self._pidfd)
        self._pidfd = -1
        if code is None:
            self._restore()
        self._messages.release()
        if not self._is_over:
            # Ctrl-C reaches both, and may end the screen before it reaches the launcher.
            self._waiting.timer("goes on", time.monotonic() + _HEARD_S, self._announce)

    def _announce(self) -> None:
        if not self._is_over and not self._is_interrupted:
            self._messages.log("The job goes on; `fleetrun top` shows it again.")

    def _restore(self) -> None:
        """Reset the terminal, in case the process was killed before it did so."""
        with suppress(OSError, termios.error):
            if self._settings is not None:
                termios.tcsetattr(1, termios.TCSADRAIN, self._settings)
            os.write(1, _BACK)
