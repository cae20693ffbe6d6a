"""The run directory as an open folder, whatever its path becomes; no link in it is followed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress

from fleetrun.rundir import secrets

# Files about a launch are readable by the owner alone; the output of ranks follows the umask.
PRIVATE = 0o600
SHARED = 0o666

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def closed(path: str) -> str | None:
    """Return the folder on the way to PATH that this user may not enter, if any."""
    for route in (os.path.abspath(path), os.path.realpath(path)):
        parts = route.split(os.sep)[1:-1]
        for count in range(len(parts)):
            folder = "/" + "/".join(parts[: count + 1])
            if os.path.isdir(folder) and not os.access(folder, os.X_OK, effective_ids=True):
                return folder
    return None


class Closing:
    """A context at whose end the descriptor FD is closed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class Folder:
    """One folder at PATH, opened when it is first used."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1

    @property
    def fd(self) -> int:
        """The folder's descriptor; raises OSError if there is no such folder."""
        if self._fd < 0:
            self._fd = os.open(self.path, _OPEN | os.O_NOFOLLOW)
        return self._fd

    def revive(self) -> None:
        """Create the folder again if it was removed."""
        if os.fstat(self.fd).st_nlink == 0:
            os.makedirs(self.path, exist_ok=True)
            self.close()

    def open(self, name: str, flags: int, mode: int = PRIVATE) -> int:
        """Open the file NAME of the folder, never through a link."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=self.fd)

    def append(self, name: str, mode: int = PRIVATE) -> int:
        """Open NAME for appending; do not wait for the reader of a pipe."""
        return self.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, mode)

    def write(self, name: str, text: str, mode: int = PRIVATE) -> None:
        """Write TEXT to the file NAME atomically: all of it, or nothing on a full disk."""
        draft = f"{name}.new"
        # A killed launcher may have left one.
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=self.fd)
        try:
            _fill(self.open(draft, _CREATE, mode), text)
            os.replace(draft, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError:
            with suppress(OSError):
                os.unlink(draft, dir_fd=self.fd)
            raise

    def write_json(self, name: str, document: object, redact: Callable[[str], str] = str) -> None:
        """Write DOCUMENT to the file NAME atomically, with REDACT applied to all its text."""
        # ASCII: any reader can take it, whatever bytes names and messages have.
        self.write(name, json.dumps(secrets.everywhere(document, redact), indent=1) + "\n")

    def add(self, name: str, text: str) -> None:
        """Append TEXT to the file NAME."""
        _fill(self.append(name), text)

    def close(self) -> None:
        """Close the folder; the next use opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        # Descriptors are scarce; free that of a folder nobody uses.
        with suppress(OSError):
            self.close()


def _fill(fd: int, text: str) -> None:
    """Write all of TEXT to FD, and close it."""
    with Closing(fd):
        write_all(fd, text.encode(errors="surrogateescape"))


def write_all(fd: int, data: bytes) -> None:
    """Write all of DATA to FD."""
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(fd, unwritten) :]


def append_whole(fd: int, data: bytes) -> None:
    """Append DATA to the file FD; raises OSError, and writes none of it, on a full disk."""
    if (written := os.write(fd, data)) < len(data):
        os.ftruncate(fd, os.fstat(fd).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def point(path: str, target: str) -> None:
    """Atomically make PATH a link to TARGET, whatever had that name."""
    folder, name = os.path.split(path)
    draft = os.path.join(folder, f".{name}.{os.getpid()}")
    os.symlink(target, draft)
    os.replace(draft, path)
