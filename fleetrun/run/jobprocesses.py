"""Find the processes of a job by the marker in their environment, and kill them."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import psutil

_PAUSE_S = 0.005


def kill_all(marker: str, seconds: float) -> bool:
    """Kill the processes with the variable MARKER=... and their descendants, for at most SECONDS.

    Return whether none is left.
    """
    name, _, value = marker.partition("=")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        family: set[psutil.Process] = set()
        for process in psutil.process_iter():
            # Gone already, or another user's.
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(name) == value:
                    family |= {process, *process.children(recursive=True)}
        if not family:
            return True
        for process in family:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_PAUSE_S)
    return False
