"""Receives the logs of a job by ssh at the head, into a run directory as one made here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress

from fleetrun.records import lockfile, names
from fleetrun.records.folder import SHARED, Closing, Folder, enter, point, write_all
from fleetrun.remote import logsender

# The header of a part is shorter.
_LONGEST_LINE = 1000
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class FetchedLogs:
    """Writes the logs that follow NONCE to LOG_DIR; ANSWER replies to the agent."""

    def __init__(self, log_dir: str, nonce: str, answer: Callable[[bytes], None]) -> None:
        self._log_dir = log_dir
        self._mark = logsender.MARK + nonce.encode()
        self._answer = answer
        # A possible beginning of the mark, or unread input after it.
        self._rest = b""
        self._is_after_mark = False
        self._run: Folder | None = None
        # The current file, and how many bytes of this part are missing.
        self._file = -1
        self._name = ""
        self._missing = 0
        self._is_whole = False
        self._is_here = False
        self._has_answered = False
        self._trouble = ""

    @property
    def is_arriving(self) -> bool:
        """Whether the launcher has ended and its logs are arriving."""
        return self._is_after_mark and not self._is_whole

    def take(self, part: bytes) -> bytes:
        """Take PART of the first host's output (empty: the end); return the text to print."""
        if self._is_after_mark:
            self._rest = b"" if self._trouble else self._rest + part
            self._read()
            return b""
        data = self._rest + part
        before, mark, after = data.partition(self._mark)
        if mark:
            self._is_after_mark, self._rest = True, after
            self._read()
            return before
        longest = min(len(self._mark) - 1, len(data)) if part else 0
        held = next((n for n in range(longest, 0, -1) if data.endswith(self._mark[:n])), 0)
        self._rest = data[len(data) - held :]
        return data[: len(data) - held]

    def _read(self) -> None:
        while not (self._trouble or self._is_whole):
            if self._missing:
                part, self._rest = self._rest[: self._missing], self._rest[self._missing :]
                self._missing -= len(part)
                self._try(lambda part=part: write_all(self._file, part))  # type: ignore[misc]
                if self._missing:
                    return
                continue
            line, newline, remaining = self._rest.partition(b"\n")
            if not newline:
                if len(line) > _LONGEST_LINE:
                    self._fail("what came is no log")
                return
            self._rest = remaining
            self._try(lambda line=line: self._take_line(line))  # type: ignore[misc]

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            self._fail(error.strerror or "a fault")
        except ValueError:
            self._fail("what came is no log")

    def _fail(self, why: str) -> None:
        self._trouble = why
        # The agent waits for an answer.
        if not self._has_answered:
            self._reply(logsender.KEEP)

    def _reply(self, word: bytes) -> None:
        self._has_answered = True
        self._answer(word)

    def _take_line(self, line: bytes) -> None:
        """Take the name of the run, or of the next file, or the end."""
        value = json.loads(line)
        if self._run is None:
            if not isinstance(value, str) or not logsender.RUN.fullmatch(value):
                raise ValueError(value)
            self._begin(value)
            return
        if value == []:
            self._is_whole = True
            return
        name, size = value if isinstance(value, list) else (None, None)
        if not (isinstance(name, str) and logsender.FILE.fullmatch(name) and isinstance(size, int)):
            raise ValueError(name)
        if name != self._name:
            self._close_file()
            if "/" in name:
                with suppress(FileExistsError):
                    os.mkdir(names.GATHERED, dir_fd=self._run.fd)
            mode = SHARED if "log." in name else 0o600
            self._file, self._name = self._run.open(name, _FLAGS, mode), name
        self._missing = max(size, 0)

    def _begin(self, run: str) -> None:
        """Create the run directory, unless this host shares the first one's log folder."""
        os.makedirs(self._log_dir, exist_ok=True)
        try:
            self._run, lock = lockfile.begin(self._log_dir, run)
        except FileExistsError:
            self._is_here = True
            self._reply(logsender.KEEP)
            return
        os.close(lock)
        self._reply(logsender.SEND)

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def finish(self) -> str:
        """Return a sentence about the result; empty if the logs were here already."""
        self._close_file()
        if self._is_here:
            return ""
        if self._run is None:
            why = f" ({self._trouble})" if self._trouble else ""
            return f"The logs could not be fetched from the first host{why}."
        with suppress(OSError):
            self._link()
        path = self._run.path
        self._run.close()
        if self._is_whole:
            return f"The logs are in {path}."
        why = self._trouble or "the connection has ended"
        return f"Not all logs could be fetched to {path} ({why})."

    def _link(self) -> None:
        """Link the run's well-known names in the log folder; existing files are kept."""
        assert self._run is not None  # see finish
        run = os.path.relpath(self._run.path, self._log_dir)
        targets = {names.LATEST: run}
        for folder in (names.GATHERED, ""):
            path = os.path.join(self._run.path, folder)
            for name in os.listdir(path) if os.path.isdir(path) else ():
                base, _, number = name.partition(".")
                if base in names.LOG_NAMES and number.isdecimal():
                    targets[name] = os.path.join(run, folder, name)
        with Closing(log_fd := enter(self._log_dir)):
            for name, target in targets.items():
                path = os.path.join(self._log_dir, name)
                if os.path.islink(path) or not os.path.lexists(path):
                    point(name, target, log_fd)
