"""Reports updates to the rank's heartbeat file, also in a training without a strategy."""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from . import border, updates

if TYPE_CHECKING:
    from collections.abc import Callable

_WHAT = "the heartbeat"


class HeartbeatFile:
    """Writes the number of updates to a file: the first ones, one every 0.1 s, the last at exit.

    The number and times of two updates follow, for the speed: the first one and a late one, as in
    `120 update 1 1795933401.250 118 1795933424.650`. Only the first line counts: a script may have
    written more.
    """

    # A write takes 5 us, but leaves caches cold: one every 20 ms slowed training down by 1 %. Slow
    # updates and the first ones are all written: a signal may end the rank without exit functions.
    _EVERY_S, _FIRST = 0.1, 32

    def __init__(self, path: str, claim: Callable[[], bool] = lambda: True) -> None:
        self._path = path
        # Whether this process trains its rank.
        self._claim = claim
        self._next_at = 0.0
        # Kept open, as NFS writes to its server when a file is closed.
        self._fd: int | None = None
        # What was written last, and the process that has counted updates last.
        self._written = 0
        self._pid = 0
        # Numbers and times of the first update and of the last one that was timed.
        self._first = self._last = (0, 0.0)

    def beat(self, _source: Any, number: int) -> None:
        """Write NUMBER if it is due; `update` distinguishes it from what a script writes."""
        self._pid = os.getpid()
        now = time.monotonic()
        if now >= self._next_at or number <= self._FIRST:
            self._next_at = now + self._EVERY_S
            if number != self._last[0]:
                self._last = number, time.time()
                self._first = self._last if self._first[0] == 0 else self._first
            self._write(number)

    def flush(self) -> None:
        """Write the number of updates if this process has made them; a forked child inherits it."""
        if self._pid == os.getpid():
            self._write(updates.count())

    def _write(self, number: int) -> None:
        """Write NUMBER, unless it was written."""
        if number == self._written or not self._path or not self._claim():
            return
        (first, began), (last, at) = self._first, self._last
        text, self._written = f"{number} update {first} {began:.3f} {last} {at:.3f}\n", number
        try:
            if self._fd is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o666)
            os.pwrite(self._fd, text.encode(), 0)
        except OSError as error:
            self._path = ""
            print(f"fleetrun: the heartbeat cannot be written: {error}", file=sys.stderr)


def install(claim: Callable[[], bool] = lambda: True) -> None:
    """Write a heartbeat after updates if the launcher has given the rank a file for it."""
    path = os.environ.get("FLEETRUN_HEARTBEAT")
    if path:
        heartbeat = HeartbeatFile(path, claim)
        updates.on_update(heartbeat.beat, _WHAT)
        # A skipped update is a sign of life, too.
        updates.on_skipped(heartbeat.beat, _WHAT)
        atexit.register(border.watching(_WHAT)(heartbeat.flush))
