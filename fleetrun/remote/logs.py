"""The logs of a job by ssh: the first host sends its run directory to the head as a tar."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from fleetrun.remote.ssh import MARK
from fleetrun.rundir import lockfile, names
from fleetrun.rundir.folder import SHARED, Folder, point

# Valid names of a run and of its files.
_ENTRY = re.compile(r"(?P<run>\w[\w.-]{1,200})/(?P<file>(gathered/)?\.?\w[\w.-]{0,200})")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def send(log_dir: str, pid: int) -> None:
    """Write the run directory of the launcher PID below LOG_DIR as a tar, if it is the latest."""
    run = os.path.realpath(os.path.join(log_dir, names.LATEST))
    try:
        with open(os.path.join(run, names.EVENTS), encoding="utf-8") as events:
            if json.loads(events.readline())["launcher_pid"] != pid:
                return
    except (OSError, ValueError, KeyError):
        return

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        # If hosts share the folder, the logs of the others are links within the run.
        target = os.path.realpath(os.path.join(os.path.dirname(run), entry.name))
        is_within = target.startswith(f"{run}/")
        is_wanted = entry.isreg() and _ENTRY.fullmatch(entry.name) and is_within
        return entry if entry.isdir() or is_wanted else None

    # The head may be killed meanwhile.
    with (
        suppress(BrokenPipeError),
        tarfile.open(fileobj=sys.stdout.buffer, mode="w|", dereference=True) as tar,
    ):
        tar.add(run, os.path.basename(run), filter=kept)


def fetch(argv: Sequence[str], order: bytes, log_dir: str) -> str:
    """Fetch the first host's run into LOG_DIR by the ssh ARGV with ORDER; return the result."""
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        folder = None
        try:
            os.makedirs(log_dir, exist_ok=True)
            process.stdin.write(order)
            process.stdin.flush()
            _skip_greeting(process.stdout)
            with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                for entry in tar:
                    folder = _take(tar, entry, folder, log_dir)
            why = "" if folder else "it has none"
        except FileExistsError as error:
            # This host is the first one, or shares its log folder.
            return f"The logs are in {error.filename}."
        except (OSError, tarfile.TarError) as error:
            why = getattr(error, "strerror", None) or "the connection has ended"
        finally:
            process.kill()
    if folder is None:
        return f"The logs could not be fetched from the first host ({why})."
    with suppress(OSError):
        _link(folder, log_dir)
    folder.close()
    if why:
        return f"Not all logs could be fetched to {folder.path} ({why})."
    return f"The logs are in {folder.path}."


def _skip_greeting(stream: IO[bytes]) -> None:
    while not (line := stream.readline()).startswith(MARK):
        if not line:
            raise tarfile.ReadError("no tar")


def _take(
    tar: tarfile.TarFile, entry: tarfile.TarInfo, folder: Folder | None, log_dir: str
) -> Folder | None:
    """Write the file ENTRY into FOLDER, which is made in LOG_DIR for the first one.

    Raises OSError, FileExistsError if the run is here, or TarError if ENTRY is no file of a run.
    """
    if entry.isdir():
        return folder
    match = _ENTRY.fullmatch(entry.name)
    content = tar.extractfile(entry)
    if match is None or content is None:
        raise tarfile.ReadError(entry.name)
    if folder is None:
        folder, lock = lockfile.begin(log_dir, match["run"])
        os.close(lock)
    name = match["file"]
    if name == names.LOCK:
        return folder
    if "/" in name:
        with suppress(FileExistsError):
            os.mkdir(names.GATHERED, dir_fd=folder.fd)
    mode = SHARED if "log." in name else 0o600
    with open(folder.open(name, _FLAGS, mode), "wb") as file:
        while part := content.read(1 << 20):
            file.write(part)
    return folder


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
    for name, target in targets.items():
        path = os.path.join(log_dir, name)
        if os.path.islink(path) or not os.path.lexists(path):
            point(path, target)
