"""Whether hosts of a job share a log folder, as on clusters with NFS.

Before it joins, each launcher puts a file with an unguessable name into its log folder. A host that
finds the first host's file in its own folder shares that folder.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress

from fleetrun.model import SharedLogs
from fleetrun.rundir import names, reading
from fleetrun.rundir.folder import SHARED, Closing

# Job name, time and pid, as the planner writes them; never a path.
_RUN_NAME = re.compile(r"\w[\w.-]{1,200}")
_LONGEST = 1000


class LogFolder:
    """The log folder PATH of LAUNCHER, whose own run would be called RUN."""

    def __init__(self, path: str, launcher: str, run: str) -> None:
        self._path, self._launcher, self._run = path, launcher, run
        self._has_made_folder = self._has_looked = False
        # The shared run and its first host's launcher; empty: none.
        self._shared = self._first = ""
        self._own = ""
        # The folders of the hosts that share it, by launcher, for the first host.
        self._folders: dict[str, str] = {}

    def _marker(self, launcher: str) -> str:
        return os.path.join(self._path, names.marker(launcher))

    def announce(self) -> None:
        """Create our file for the others to find; if that fails, the folder counts as our own."""
        with suppress(OSError):
            # A host that shares the folder may make it at the same time.
            with suppress(FileExistsError):
                os.makedirs(self._path)
                self._has_made_folder = True
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with Closing(fd := os.open(self._marker(self._launcher), flags, SHARED)):
                os.write(fd, os.fsencode(self._run))

    def look(
        self, launchers: Sequence[str], generation: int, attempts: Sequence[int] = ()
    ) -> SharedLogs | None:
        """Return which of LAUNCHERS, in rank order, share the first's folder; None if we do not.

        ATTEMPTS are the numbers of this generation as each of them counts. The first result holds
        for the whole job, as files stay where they are.
        """
        is_first = not self._has_looked
        if is_first:
            self._has_looked, self._first = True, launchers[0]
        if self._first == self._launcher:
            for launcher in launchers:
                if launcher not in self._folders and launcher != self._launcher:
                    self._add(launcher, names.node_folder(launchers.index(launcher), generation))
            if is_first and self._folders:
                self._shared = self._run
        elif is_first and _RUN_NAME.fullmatch(run := self._read(self._first)):
            self._shared = run
            self._own = names.node_folder(launchers.index(self._launcher), generation)
        if not self._shared:
            return None
        known = {rank: self._folders.get(member) for rank, member in enumerate(launchers)}
        return SharedLogs(
            run_name=self._shared,
            marker=names.marker(self._first),
            folders={rank: folder for rank, folder in known.items() if folder},
            attempts=dict(enumerate(attempts)),
            own=self._own,
        )

    def _add(self, launcher: str, folder: str) -> None:
        if self._read(launcher):
            self._folders[launcher] = folder

    def _read(self, launcher: str) -> str:
        """Return what LAUNCHER has written here as our user; empty: nothing."""
        with suppress(OSError):
            # On NFS, which maps users, ours is that of our own file.
            user = os.stat(self._marker(self._launcher), follow_symlinks=False).st_uid
            with Closing(fd := os.open(self._marker(launcher), reading.READING)):
                status = os.fstat(fd)
                if status.st_uid == user and stat.S_ISREG(status.st_mode):
                    return os.fsdecode(os.read(fd, _LONGEST))
        return ""

    def settle(self, *, has_begun: bool) -> None:
        """Remove our file, which all have seen; the first host's stays for newcomers.

        If the job has not begun, leave no trace.
        """
        if not has_begun or not self._folders:
            with suppress(OSError):
                os.unlink(self._marker(self._launcher))
        if not has_begun and self._has_made_folder:
            with suppress(OSError):
                os.rmdir(self._path)
