"""The run directory, where files are created whole; no link in it is followed."""

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


class Folder:
    """The folder at PATH."""

    def __init__(self, path: str) -> None:
        self.path = path

    def open(self, name: str, flags: int, mode: int = PRIVATE) -> int:
        """Open the file NAME of the folder, never through a link."""
        return os.open(os.path.join(self.path, name), flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)

    def append(self, name: str, mode: int = PRIVATE) -> int:
        """Open NAME for appending; do not wait for the reader of a pipe."""
        return self.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, mode)

    def write(self, name: str, text: str, mode: int = PRIVATE) -> None:
        """Write TEXT to the file NAME atomically: all of it, or nothing on a full disk."""
        path = os.path.join(self.path, name)
        # A killed launcher may have left one.
        with suppress(FileNotFoundError):
            os.unlink(f"{path}.new")
        try:
            _fill(self.open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), text)
            os.replace(f"{path}.new", path)
        except OSError:
            with suppress(OSError):
                os.unlink(f"{path}.new")
            raise

    def write_json(self, name: str, document: object, redact: Callable[[str], str] = str) -> None:
        """Write DOCUMENT to the file NAME atomically, with REDACT applied to all its text."""
        # ASCII: any reader can take it, whatever bytes names and messages have.
        self.write(name, json.dumps(secrets.everywhere(document, redact), indent=1) + "\n")

    def add(self, name: str, text: str) -> None:
        """Append TEXT to the file NAME."""
        _fill(self.append(name), text)


def _fill(fd: int, text: str) -> None:
    """Write all of TEXT to FD, and close it."""
    with open(fd, "wb") as file:
        file.write(text.encode(errors="surrogateescape"))


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
