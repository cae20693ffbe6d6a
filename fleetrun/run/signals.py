"""Signals as bytes on a descriptor, so that one loop sees them among everything else."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from types import FrameType

from fleetrun.run import libc

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
# nohup ignores HUP, and a shell without job control TSTP; if ignored, they stay so.
# INT is different: a script's background job ignores it, and `kill -INT` must still work.
_STAY_IGNORED = frozenset((signal.SIGHUP, signal.SIGTSTP))
# Python ignores these two; its child processes must not.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


# Signals that a terminal sends to its whole foreground group, the launcher included.
_OF_TERMINAL = (signal.SIGINT, signal.SIGHUP)
_SIGINFO_BYTES = 128
_SI_KERNEL = 0x80


class TerminalSignals:
    """Distinguishes Ctrl-C, sent to the whole foreground group, from `kill -INT launcher`."""

    def __init__(self) -> None:
        self._caught = [
            signum for signum in _OF_TERMINAL if signal.getsignal(signum) != signal.SIG_IGN
        ]
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._caught)
        self.fd = libc.signalfd(self._caught)
        # A background process that reads the terminal stops its group, the launcher included.
        self._previous = signal.signal(signal.SIGTTIN, _do_nothing)

    def read(self) -> list[tuple[int, bool]]:
        """Return the signals since the last call: number, and whether the terminal sent it."""
        try:
            data = os.read(self.fd, 16 * _SIGINFO_BYTES)
        except BlockingIOError:
            return []

        signals = []
        for start in range(0, len(data), _SIGINFO_BYTES):
            signum, _, code = struct.unpack_from("=Iii", data, start)
            signals.append((signum, code == _SI_KERNEL))
        return signals

    def close(self) -> None:
        """Restore mask and handler."""
        os.close(self.fd)
        signal.signal(signal.SIGTTIN, self._previous)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


class Signals:
    """Catches what `HANDLED` lists, from construction until `close`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._previous: list[tuple[signal.Signals, Handler]] = []
        for signum in HANDLED:
            if signum in _STAY_IGNORED and signal.getsignal(signum) == signal.SIG_IGN:
                continue
            self._previous.append((signum, signal.signal(signum, _do_nothing)))

    def read(self) -> bytes:
        """Return the numbers of the signals since the last call, in order."""
        try:
            return os.read(self.fd, 4096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """Restore every handler and the wake-up descriptor."""
        for signum, handler in self._previous:
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self.fd)
        os.close(self._write_fd)


def defaults_for_children() -> list[int]:
    """Return the signals that must have their default action in a worker."""
    caught = [signum for signum in HANDLED if signal.getsignal(signum) != signal.SIG_IGN]
    return [*caught, *_PYTHON_IGNORES]


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the signal is on the wake-up descriptor already."""
