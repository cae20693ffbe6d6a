"""Find the processes of a job in /proc by the marker in their environment, and kill them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from fleetrun.run import proc

_PAUSE_S = 0.005


def kill_all(marker: bytes, seconds: float) -> bool:
    """Kill the processes with MARKER and their descendants, for at most SECONDS.

    Return whether none is left.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        everyone = proc.all_processes()
        marked = {
            process.pid
            for process in everyone
            if b"\0" + marker + b"\0" in b"\0" + proc.content(f"/proc/{process.pid}/environ")
        }
        family = proc.descendants(everyone, marked) - {os.getpid()}
        if not family:
            return True
        for process in everyone:
            if process.pid in family:
                # Gone already, or a set-user-id program.
                with suppress(OSError):
                    proc.send(process, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return False
