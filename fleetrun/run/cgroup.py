"""Killing processes that may not be signalled, such as set-user-id programs, by cgroup.kill.

This needs a delegated cgroup v2, or root. The processes are moved into the cgroup just before they
are killed: for its whole life a rank keeps the cgroup, and the limits, of its container.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

from fleetrun.run import proc
from fleetrun.run.loop import poll

# How long to wait until the killed processes have left the cgroup; a device may hold them.
_SECONDS = 1.0
_PAUSE_S = 0.005


def kill(pids: Iterable[int]) -> None:
    """Kill PIDS, unreaped children, if a cgroup can be created for it."""
    current = _current()
    if not current:
        return
    folder = f"{current}/fleetrun-{os.getpid()}"
    try:
        os.mkdir(folder)
    except OSError:
        return
    try:
        if os.path.exists(f"{folder}/cgroup.kill"):
            for pid in pids:
                _write(f"{folder}/cgroup.procs", str(pid))
            _write(f"{folder}/cgroup.kill", "1")
    finally:
        _remove(folder)


def _current() -> str:
    """Return the folder of this process's cgroup; empty without cgroup v2."""
    folders = proc.cgroups(of=("",))
    return next((path for path in folders if os.path.exists(f"{path}/cgroup.controllers")), "")


def _write(path: str, text: str) -> None:
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
        file.write(text)


def _remove(folder: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while not _is_removed(folder) and time.monotonic() < deadline:
        poll(_PAUSE_S)


def _is_removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
