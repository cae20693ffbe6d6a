"""Killing what we may not signal, such as a set-user-id program: the kernel does it for a cgroup.

Only where cgroup v2 is delegated to us, or we are root. The processes are moved for that moment:
one that ran in a cgroup of its own would not find the limits of its container there.
"""

# pathlib costs start-up time.
# ruff: noqa: PTH102, PTH106, PTH110, PTH123

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING

from fleetrun.run import proc

if TYPE_CHECKING:
    from collections.abc import Iterable

_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
# What is killed leaves its cgroup when it has ended; a device may hold it.
_SECONDS = 1.0
_PAUSE_MS = 5


def kill(pids: Iterable[int]) -> None:
    """Kill PIDS, children that we have not reaped yet, if a cgroup can be made for that."""
    own = _own()
    folder = f"{own}/fleetrun-{os.getpid()}"
    if not own:
        return
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


def _own() -> str:
    """Return the folder of the cgroup that we are in; nothing where there is no version 2."""
    for line in proc.content("/proc/self/cgroup").decode(errors="replace").splitlines():
        if line.startswith("0::"):
            path = line[3:].rstrip("/")
            folders = [root + path for root in _ROOTS]
            found = [one for one in folders if os.path.exists(f"{one}/cgroup.controllers")]
            return next(iter(found), "")
    return ""


def _write(path: str, text: str) -> None:
    with contextlib.suppress(OSError), open(path, "w", encoding="ascii") as file:
        file.write(text)


def _remove(folder: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while not _is_removed(folder) and time.monotonic() < deadline:
        select.poll().poll(_PAUSE_MS)


def _is_removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
