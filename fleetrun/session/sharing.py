"""Whether hosts of a job share a log folder, as on clusters with NFS.

Before it joins, each launcher puts an empty file with an unguessable name into its log folder. A
host that finds the first host's file in its own folder shares that folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress

from fleetrun.model import SharedLogs
from fleetrun.rundir import names
from fleetrun.rundir.folder import SHARED
from fleetrun.session.messages import JoinRequest


class LogFolder:
    """The log folder PATH of LAUNCHER."""

    def __init__(self, path: str, launcher: str) -> None:
        self._path, self._launcher = path, launcher
        self._has_made_folder = False
        # The first host when the job began, and the folders of the hosts that share its own, by
        # launcher; the first host knows all, and any other one its own.
        self._first: JoinRequest | None = None
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
            os.close(os.open(self._marker(self._launcher), flags, SHARED))

    def look(self, entries: Sequence[JoinRequest], generation: int) -> SharedLogs | None:
        """Return which of the hosts ENTRIES, in rank order, share the first's folder with us.

        None: we share no folder. The first result holds for the whole job, as files stay where
        they are.
        """
        is_new, first = self._first is None, self._first or entries[0]
        self._first = first
        is_first = first.launcher == self._launcher
        for node_rank, entry in enumerate(entries):
            # The first host looks for all others, also later ones; each of those once for its own.
            is_due = is_first or (is_new and entry.launcher == self._launcher)
            is_other = entry.launcher not in (first.launcher, *self._folders)
            if is_due and is_other and self._has(entry.launcher if is_first else first.launcher):
                self._folders[entry.launcher] = names.node_folder(node_rank, generation)
        if not self._folders:
            return None
        known = {rank: self._folders.get(entry.launcher) for rank, entry in enumerate(entries)}
        return SharedLogs(
            run_name=first.run,
            marker=names.marker(first.launcher),
            folders={rank: folder for rank, folder in known.items() if folder and is_first},
            attempts={rank: entry.attempt for rank, entry in enumerate(entries)},
            own=self._folders.get(self._launcher, ""),
        )

    def _has(self, launcher: str) -> bool:
        """Whether LAUNCHER has put its file here as our user: on NFS, that of our own file."""
        with suppress(OSError):
            own, other = (
                os.stat(self._marker(name), follow_symlinks=False)
                for name in (self._launcher, launcher)
            )
            return own.st_uid == other.st_uid and stat.S_ISREG(other.st_mode)
        return False

    def settle(self, *, has_begun: bool) -> None:
        """Remove our file, which all have seen; the first host's stays for newcomers.

        If the job has not begun, leave no trace.
        """
        is_first = self._first is not None and self._first.launcher == self._launcher
        if not (has_begun and is_first and self._folders):
            with suppress(OSError):
                os.unlink(self._marker(self._launcher))
        if not has_begun and self._has_made_folder:
            with suppress(OSError):
                os.rmdir(self._path)
