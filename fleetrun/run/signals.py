"""Signals as bytes on a descriptor, so that one loop sees them among everything else."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

HANDLED = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTSTP,
    signal.SIGCONT,
    signal.SIGCHLD,
)
# nohup has HUP ignored, a shell without job control TSTP; what was ignored for us stays ignored.
# INT is different: a script's background job has it ignored, and `kill -INT` must still work.
_STAY_IGNORED = frozenset((signal.SIGHUP, signal.SIGTSTP))
# Python ignores these two for itself; what it starts shall not.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


class Signals:
    """Catches what `HANDLED` lists, from construction until `close`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._previous: list[tuple[signal.Signals, Handler]] = []
        for one in HANDLED:
            if one in _STAY_IGNORED and signal.getsignal(one) is signal.SIG_IGN:
                continue
            self._previous.append((one, signal.signal(one, _do_nothing)))

    def read(self) -> bytes:
        """Return the numbers of the signals that came since the last call, in their order."""
        try:
            return os.read(self.fd, 4096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Put every handler back, and the wake-up descriptor."""
        for one, handler in self._previous:
            signal.signal(one, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self.fd)
        os.close(self._write_fd)


def defaults_for_children() -> list[int]:
    """Return the signals that a worker must find as if no Python had started it."""
    caught = [one for one in HANDLED if signal.getsignal(one) is not signal.SIG_IGN]
    return [*caught, *_PYTHON_IGNORES]


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Leave it to the wake-up descriptor, which has the signal already."""
