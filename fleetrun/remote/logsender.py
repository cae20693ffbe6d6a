"""The logs of a job by ssh, on their way: the first host's agent sends them at the end.

After a mark that only the head and the agent know come JSON lines: the run's name, and when the
head has asked for them, a file's name and size before each part of it; `[]` is the end.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

from fleetrun.records import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Neither ranks nor launchers know what follows it.
MARK = b"\x1e"
# What the head answers: it wants the files, or has them already, as the folder is the same.
SEND, KEEP = b"send", b"keep"
PART = 1 << 16
# Names of a run and of its files; a file may be in one folder.
RUN = re.compile(r"\w[\w.-]{1,200}")
FILE = re.compile(r"(gathered/)?\.?\w[\w.-]{0,200}")
_LOG = re.compile(rf"(gathered/)?({'|'.join(names.LOG_NAMES)})\.")


def find(folder: str, pid: int) -> str | None:
    """Return the run directory of the launcher PID below the log FOLDER of this host, if any."""
    run = os.path.realpath(os.path.join(folder, names.LATEST))
    try:
        with open(os.path.join(run, names.EVENTS), encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(first, dict) and first.get("launcher_pid") == pid
    return run if is_ours and RUN.fullmatch(os.path.basename(run)) else None


def beginning(run: str, nonce: str) -> bytes:
    """Return what comes before the logs of RUN: the mark with NONCE, and the name."""
    return MARK + nonce.encode() + json.dumps(os.path.basename(run)).encode() + b"\n"


def send(run: str, *, everything: bool, write: Callable[[bytes], None]) -> None:
    """Write all files of the directory RUN; of ranks' logs the end, unless EVERYTHING is wanted."""
    for name in _files(run):
        for part in _parts(os.path.join(run, name), everything=everything or not _LOG.match(name)):
            write(json.dumps([name, len(part)]).encode() + b"\n" + part)
    write(b"[]\n")


def _files(run: str) -> Iterator[str]:
    for folder in ("", f"{names.GATHERED}/"):
        path = os.path.join(run, folder)
        for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
            # Where hosts share the folder, the logs of the others are links within it.
            found = os.path.realpath(os.path.join(path, name))
            is_inside = found.startswith(run + os.sep) and os.path.isfile(found)
            if is_inside and name != names.LOCK and FILE.fullmatch(folder + name):
                yield folder + name


def _parts(path: str, *, everything: bool) -> Iterator[bytes]:
    """Yield the file PATH, or its end with a line that says so; something, even if it is empty."""
    try:
        with open(path, "rb") as file:
            # What grows meanwhile, as with a rank that nothing ends, is left out.
            size = os.fstat(file.fileno()).st_size
            left = size if everything else min(size, names.GATHERED_BYTES)
            file.seek(size - left)
            head = b"" if left == size else names.shortened(size, left)
            yield head
            while left and (part := file.read(min(left, PART))):
                left -= len(part)
                yield part
    except OSError as error:
        yield f"[fleetrun: it could not be read: {error.strerror}]\n".encode()
