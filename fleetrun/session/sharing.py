"""Whether hosts of a job share a log folder, as on clusters with NFS.

Before it joins, each launcher puts a file with an unguessable name into its log folder. A host that
finds the first host's file in its own folder shares that folder.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fleetrun.model import SharedLogs
from fleetrun.rundir import names
from fleetrun.rundir.folder import SHARED, Closing, enter

# Job name, time and pid, as the planner writes them; never a path.
_RUN_NAME = re.compile(r"\w[\w.-]{1,200}")
_LONGEST = 1000


class LogFolder:
    """The log folder PATH of LAUNCHER, whose own run would be called RUN."""

    def __init__(self, path: str, launcher: str, run: str) -> None:
        self._path = path
        self._launcher = launcher
        self._run = run
        self._has_made_folder = False
        self._has_looked = False
        # The shared run and its first host's launcher; empty: none.
        self._shared = self._first = ""
        self._own = ""
        # The folders of the hosts that share it, by launcher, for the first host.
        self._folders: dict[str, str] = {}

    def announce(self) -> None:
        """Create our file for the others to find; if that fails, the folder counts as our own."""
        with suppress(OSError):
            # A host that shares the folder may make it at the same time.
            with suppress(FileExistsError):
                os.makedirs(self._path)
                self._has_made_folder = True
            self._write(names.marker(self._launcher), os.fsencode(self._run), SHARED)

    def look(
        self, launchers: Sequence[str], generation: int, attempts: Sequence[int] = ()
    ) -> SharedLogs | None:
        """Return which of LAUNCHERS, in rank order, share the first's folder; None if we do not.

        ATTEMPTS are the numbers of this generation as each of them counts. The first result holds
        for the whole job, as files stay where they are.
        """
        if not self._has_looked:
            self._has_looked = True
            self._begin(launchers, generation)
        if not self._shared:
            return None
        if not self._own:
            self._add(launchers, generation)
        known = {rank: self._folders.get(member) for rank, member in enumerate(launchers)}
        return SharedLogs(
            run_name=self._shared,
            marker=names.marker(self._first),
            folders={rank: folder for rank, folder in known.items() if folder},
            attempts=dict(enumerate(attempts)),
            own=self._own,
        )

    def _begin(self, launchers: Sequence[str], generation: int) -> None:
        """Find out whether we share the first host's folder, or who shares ours if we are first."""
        self._first = launchers[0]
        if self._first == self._launcher:
            self._add(launchers, generation)
            self._shared = self._run if self._folders else ""
            return
        run = self._read((self._first,)).get(self._first, "")
        if _RUN_NAME.fullmatch(run):
            self._shared = run
            self._own = names.node_folder(launchers.index(self._launcher), generation)

    def _add(self, launchers: Sequence[str], generation: int) -> None:
        """Note the folders of new launchers."""
        new = [member for member in launchers if member not in {*self._folders, self._launcher}]
        for member in self._read(new):
            self._folders[member] = names.node_folder(launchers.index(member), generation)

    def _read(self, launchers: Sequence[str]) -> dict[str, str]:
        """Return what LAUNCHERS have written here as our user."""
        texts: dict[str, str] = {}
        with suppress(OSError), self._entered() as folder:
            user = _status(names.marker(self._launcher), folder).st_uid
            for member in launchers:
                with suppress(OSError):
                    if _status(names.marker(member), folder).st_uid == user:
                        texts[member] = _text(names.marker(member), folder)
        return texts

    def settle(self) -> None:
        """Remove our file, which all have seen; the first host's stays for newcomers."""
        if not self._folders:
            self._remove(names.marker(self._launcher))

    def withdraw(self) -> None:
        """Leave no trace, as the job does not start."""
        self._remove(names.marker(self._launcher))
        if self._has_made_folder:
            with suppress(OSError):
                os.rmdir(self._path)

    def _remove(self, name: str) -> None:
        with suppress(OSError), self._entered() as folder:
            os.unlink(name, dir_fd=folder)

    @contextmanager
    def _entered(self) -> Iterator[int]:
        """Open the folder; raises OSError."""
        with Closing(folder := enter(self._path)):
            yield folder

    def _write(self, name: str, data: bytes, mode: int) -> None:
        """Write DATA to the new file NAME."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._entered() as folder, Closing(fd := os.open(name, flags, mode, dir_fd=folder)):
            os.write(fd, data)


def _status(name: str, folder: int) -> os.stat_result:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(name)
    return status


def _text(name: str, folder: int) -> str:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with Closing(fd := os.open(name, flags, dir_fd=folder)):
        return os.fsdecode(os.read(fd, _LONGEST))
