"""The logs of a job by ssh: the first host sends its run directory to the head as a tar."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO

from fleetrun.remote.ssh import MARK
from fleetrun.rundir import lockfile, names
from fleetrun.rundir.folder import SHARED, Closing, Folder, enter, point

# Send logs whole, not only their ends.
ALL = "all"
# Valid names of a run and of its files.
_RUN = re.compile(r"\w[\w.-]{1,200}")
_FILE = re.compile(r"(gathered/)?\.?\w[\w.-]{0,200}")
_LOG = re.compile(rf"(gathered/)?({'|'.join(names.LOG_NAMES)})\.")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def find(folder: str, pid: int) -> str | None:
    """Return the run directory of the launcher PID below the log FOLDER of this host, if any."""
    run = os.path.realpath(os.path.join(folder, names.LATEST))
    try:
        with open(os.path.join(run, names.EVENTS), encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(first, dict) and first.get("launcher_pid") == pid
    return run if is_ours and _RUN.fullmatch(os.path.basename(run)) else None


def send(run: str, *, is_all: bool) -> None:
    """Write all files of the directory RUN as a tar; only the ends of ranks' logs unless IS_ALL."""
    # The head may be killed meanwhile.
    with suppress(BrokenPipeError), tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
        for name in _files(run):
            with suppress(OSError), open(os.path.join(run, name), "rb") as file:
                # Output that is written meanwhile is left out.
                size = os.fstat(file.fileno()).st_size
                kept = size if is_all or not _LOG.match(name) else min(size, names.GATHERED_BYTES)
                file.seek(size - kept)
                entry = tarfile.TarInfo(name)
                if kept == size:
                    entry.size = size
                    tar.addfile(entry, file)
                else:
                    text = names.shortened(size, kept) + file.read(kept)
                    entry.size = len(text)
                    tar.addfile(entry, io.BytesIO(text))


def _files(run: str) -> Iterator[str]:
    for folder in ("", f"{names.GATHERED}/"):
        path = os.path.join(run, folder)
        for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
            # If hosts share the folder, the logs of the others are links within it.
            target = os.path.realpath(os.path.join(path, name))
            is_inside = target.startswith(run + os.sep) and os.path.isfile(target)
            if is_inside and name != names.LOCK and _FILE.fullmatch(folder + name):
                yield folder + name


def fetch(argv: Sequence[str], order: bytes, run: str, log_dir: str) -> str:
    """Fetch RUN of the first host into LOG_DIR by the ssh ARGV with ORDER; return the result."""
    name = os.path.basename(run)
    if not _RUN.fullmatch(name):
        return "The logs could not be fetched from the first host (what came is no log)."
    try:
        os.makedirs(log_dir, exist_ok=True)
        folder, lock = lockfile.begin(log_dir, name)
    except FileExistsError:
        # This host is the first one, or shares its log folder.
        return f"The logs are in {os.path.join(log_dir, names.RUNS, name)}."
    except OSError as error:
        return f"The logs could not be fetched from the first host ({error.strerror})."
    os.close(lock)
    why = ""
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(order)
            process.stdin.flush()
            receive(process.stdout, folder)
        except (OSError, tarfile.TarError) as error:
            why = getattr(error, "strerror", None) or "the connection has ended"
            process.kill()
    with suppress(OSError):
        _link(folder, log_dir)
    path = folder.path
    folder.close()
    if why:
        return f"Not all logs could be fetched to {path} ({why})."
    return f"The logs are in {path}."


def receive(stream: IO[bytes], folder: Folder) -> None:
    """Write the files of the tar that follows MARK in STREAM into FOLDER.

    Raises OSError, or TarError if it is not whole.
    """
    while not (line := stream.readline()).startswith(MARK):
        if not line:
            raise tarfile.ReadError("no tar")
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for entry in tar:
            content = tar.extractfile(entry) if entry.isreg() else None
            if content is None or not _FILE.fullmatch(entry.name):
                raise tarfile.ReadError(entry.name)
            if "/" in entry.name:
                with suppress(FileExistsError):
                    os.mkdir(names.GATHERED, dir_fd=folder.fd)
            mode = SHARED if "log." in entry.name else 0o600
            with open(folder.open(entry.name, _FLAGS, mode), "wb") as file:
                while part := content.read(1 << 20):
                    file.write(part)


def _link(folder: Folder, log_dir: str) -> None:
    """Link the run's well-known names in the log folder; existing files are kept."""
    run = os.path.relpath(folder.path, log_dir)
    targets = {names.LATEST: run}
    for part in (names.GATHERED, ""):
        path = os.path.join(folder.path, part)
        for name in os.listdir(path) if os.path.isdir(path) else ():
            base, _, number = name.partition(".")
            if base in names.LOG_NAMES and number.isdecimal():
                targets[name] = os.path.join(run, part, name)
    with Closing(log_fd := enter(log_dir)):
        for name, target in targets.items():
            path = os.path.join(log_dir, name)
            if os.path.islink(path) or not os.path.lexists(path):
                point(name, target, log_fd)
