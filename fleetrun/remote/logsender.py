"""Sends the logs of a job by ssh: the first host's agent does so at the end.

After a mark that only the head and the agent know comes the run's name as a line of JSON. If the
head asks for the files, a line with name and size precedes each part; `[]` is the end.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator

from fleetrun.records import names

# A nonce that neither ranks nor launchers know follows it.
MARK = b"\x1e"
# The head's answers: it wants the files, or shares the folder and has them already.
SEND, KEEP = b"send", b"keep"
PART = 1 << 16
# Valid names of a run and of its files.
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
    """Return the header of the logs of RUN: the mark with NONCE, and the name."""
    return MARK + nonce.encode() + json.dumps(os.path.basename(run)).encode() + b"\n"


def send(run: str, *, everything: bool, write: Callable[[bytes], None]) -> None:
    """Write all files of the directory RUN; only the end of ranks' logs unless EVERYTHING."""
    for name in _files(run):
        for part in _parts(os.path.join(run, name), everything=everything or not _LOG.match(name)):
            write(json.dumps([name, len(part)]).encode() + b"\n" + part)
    write(b"[]\n")


def _files(run: str) -> Iterator[str]:
    for folder in ("", f"{names.GATHERED}/"):
        path = os.path.join(run, folder)
        for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
            # If hosts share the folder, the logs of the others are links within it.
            target = os.path.realpath(os.path.join(path, name))
            is_inside = target.startswith(run + os.sep) and os.path.isfile(target)
            if is_inside and name != names.LOCK and FILE.fullmatch(folder + name):
                yield folder + name


def _parts(path: str, *, everything: bool) -> Iterator[bytes]:
    """Yield the file PATH, or its end after a line that says so; at least one part."""
    try:
        with open(path, "rb") as file:
            # Output that a rank writes meanwhile is left out.
            size = os.fstat(file.fileno()).st_size
            remaining = size if everything else min(size, names.GATHERED_BYTES)
            file.seek(size - remaining)
            notice = b"" if remaining == size else names.shortened(size, remaining)
            yield notice
            while remaining and (part := file.read(min(remaining, PART))):
                remaining -= len(part)
                yield part
    except OSError as error:
        yield f"[fleetrun: it could not be read: {error.strerror}]\n".encode()
