"""Whether hosts of a job share a log folder, as on clusters with NFS.

Before it joins, each launcher puts an empty file with an unguessable name into its log folder. A
host that finds the first host's file in its own folder shares that folder.
"""

from __future__ import annotations

import os
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
        # The first host when the job began, and the folders of the hosts that share its own, by
        # launcher; the first host knows all, and any other one its own.
        self._first: JoinRequest | None = None
        self._folders: dict[str, str] = {}

    def _marker(self, launcher: str) -> str:
        return os.path.join(self._path, names.marker(launcher))

    def announce(self) -> None:
        """Create our file for the others to find; if that fails, the folder counts as our own."""
        with suppress(OSError):
            os.makedirs(self._path, exist_ok=True)
            os.close(os.open(self._marker(self._launcher), os.O_CREAT | os.O_EXCL, SHARED))

    def look(self, entries: Sequence[JoinRequest], generation: int) -> SharedLogs | None:
        """Return which of the hosts ENTRIES, in rank order, share the first's folder with us.

        None: we share no folder. The first result holds for the whole job, as files stay where
        they are; the first host looks for others that come later.
        """
        is_new, first = self._first is None, self._first or entries[0]
        self._first, is_first = first, first.launcher == self._launcher
        for node_rank, entry in enumerate(entries):
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
        # Another user could not write into the same run directory. On NFS, that of our own file.
        with suppress(OSError):
            own, other = (os.lstat(self._marker(name)) for name in (self._launcher, launcher))
            return own.st_uid == other.st_uid
        return False

    def settle(self, *, has_begun: bool) -> None:
        """Remove our file, which all have seen; the first host's stays for newcomers.

        If the job has not begun, leave no trace.
        """
        is_first = self._first is not None and self._first.launcher == self._launcher
        with suppress(OSError):
            if not (has_begun and is_first and self._folders):
                os.unlink(self._marker(self._launcher))
            if not has_begun:
                os.rmdir(self._path)
