"""How much slower than an idle machine this one is just now, so that bounds on time hold on both.

A child burns a little processor time again and again, and tells how long that took by the clock.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

_BURN_S = 0.02
_PAUSE_S = 0.18


class Pace:
    """Measures from construction until `end`, in a process as nice as we are."""

    def __init__(self) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reader)
            with suppress(BaseException):
                _burn(writer)
            os._exit(0)
        os.close(writer)
        self._samples: list[tuple[float, float]] = []
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def slowdown(self, since: float) -> float:
        """Return the worst since the moment SINCE: 1 on an idle machine, 4 at a quarter of it."""
        with self._lock:
            self._take()
            now = time.monotonic()
            factors = [factor for at, factor in self._samples if at >= since]
        # What is not told yet may be the worst.
        return max(1.0, *factors, (now - self._last - _PAUSE_S) / _BURN_S)

    def end(self) -> None:
        """Stop measuring."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._reader)

    def _take(self) -> None:
        while select.select([self._reader], [], [], 0)[0]:
            lines = os.read(self._reader, 1 << 16).split()
            if not lines:
                return
            for line in lines:
                at = float(line)
                self._samples.append((at, (at - self._last - _PAUSE_S) / _BURN_S))
                self._last = at


def _burn(writer: int) -> None:
    """Say when each round is done, until nobody listens."""
    parent = os.getppid()
    while os.getppid() == parent and Path(f"/proc/{parent}").exists():
        time.sleep(_PAUSE_S)
        end = time.process_time() + _BURN_S
        while time.process_time() < end:
            pass
        os.write(writer, b"%.6f\n" % time.monotonic())
