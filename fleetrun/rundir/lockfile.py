"""`lock` marks a run directory with its launcher and its name; no schema.

One line, `fleetrun PID NAME`. The launcher holds a flock on the file while it runs.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from fleetrun.rundir import names
from fleetrun.rundir.folder import Closing, Folder, enter


def mark(pid: int, name: str) -> bytes:
    """Return the mark of the launcher PID for the folder NAME; a copy has another name."""
    return b"fleetrun %d %b\n" % (pid, os.fsencode(name))


def launcher(fd: int, name: str) -> int | None:
    """Return the launcher whose mark for the folder NAME is in the file FD, if any.

    Raises OSError if the file cannot be read.
    """
    # No mark is longer; anything after a mark invalidates it.
    text = os.pread(fd, len(mark(2**63, name)), 0)
    pid = text.split(b" ")[1:2]
    if not pid or not pid[0].isdigit() or text != mark(int(pid[0]), name):
        return None
    return int(pid[0])


def is_locked(fd: int) -> bool:
    """Lock FD; return True if a living process has the lock, or if unknown."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def begin(log_dir: str, name: str) -> tuple[Folder, int]:
    """Create the run directory NAME in LOG_DIR; return it and its lock, which we hold.

    Raises FileExistsError if it exists.
    """
    with suppress(FileExistsError):
        os.mkdir(os.path.join(log_dir, names.RUNS))
    folder = Folder(os.path.join(log_dir, names.RUNS, name))
    with Closing(runs := enter(os.path.join(log_dir, names.RUNS))):
        folder.make(runs)
    return folder, hold(folder, os.getpid())


def hold(folder: Folder, launcher: int) -> int:
    """Create, hold and return the lock of FOLDER for LAUNCHER; raises FileExistsError."""
    lock = folder.open(names.LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    is_locked(lock)
    os.write(lock, mark(launcher, os.path.basename(folder.path)))
    return lock
