"""`lock`, the line `fleetrun PID NAME`, on which the launcher of a run directory holds a flock."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from fleetrun.rundir import names, reading
from fleetrun.rundir.folder import Folder


def launcher_of(run_dir: str) -> int | None:
    """Return the process id of the launcher that has created RUN_DIR; a copy has another name."""
    match (reading.content(os.path.join(run_dir, names.LOCK), 4096) or b"").split(b" ", 2):
        case [b"fleetrun", pid, name] if pid.isdigit():
            return int(pid) if name == os.fsencode(os.path.basename(run_dir)) + b"\n" else None
        case _:
            return None


def hold(folder: Folder, launcher: int) -> int:
    """Create, hold and return the lock of FOLDER for LAUNCHER; raises FileExistsError."""
    lock = folder.open(names.LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    with suppress(OSError):
        # Some network file systems have no locks. One who looks may have it for a moment.
        fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, b"fleetrun %d %b\n" % (launcher, os.fsencode(os.path.basename(folder.path))))
    return lock


def is_running(path: str) -> bool:
    """Whether the launcher of the run directory PATH is alive."""
    try:
        lock = open(os.path.join(path, names.LOCK), "rb")  # noqa: SIM115 - closed below
    except OSError:
        return False
    with lock:
        try:
            # Shared, so that several may check at once; the launcher's is exclusive.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def listed(log_dir: str) -> list[str]:
    """Return the run directories in LOG_DIR, the newest first."""
    folder = os.path.join(log_dir, names.RUNS)
    entries = sorted(os.listdir(folder), reverse=True) if os.path.isdir(folder) else []
    paths = [os.path.join(folder, name) for name in entries]
    return [path for path in paths if os.path.exists(os.path.join(path, names.LOCK))]
