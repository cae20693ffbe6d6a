"""The heartbeat file of a rank: any script may write its step there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from fleetrun.rundir import reading
from fleetrun.rundir.folder import beside

_MOST = 128
_WORDS = 6
# Python does not name it.
_CLOCK_REALTIME_COARSE = 5


def file_clock_ns() -> int:
    """Return the time by the clock that dates files, which `time.time()` may be ahead of."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


def read_step(path: str) -> int | None:
    """Return the last step in PATH (`echo 120 > $FLEETRUN_HEARTBEAT`), if any."""
    words = (reading.content(path, _MOST) or b"").split()
    # A file that is being written has no number yet.
    return int(words[0]) if words and words[0].isdigit() else None


def last_step(paths: Iterable[str]) -> int | None:
    """Return the highest of the steps in PATHS, of which few may exist; None without any."""
    paths = list(filter(None, paths))
    there = beside(paths)
    steps = [read_step(path) for path in paths if path in there]
    return max((step for step in steps if step is not None), default=None)


def is_scripts(path: str) -> bool:
    """Whether the script wrote the heartbeat at PATH, and not our callback after an update."""
    return (reading.content(path, _MOST) or b"").split()[1:2] != [b"update"]


def points(path: str) -> tuple[tuple[float, int], ...]:
    """Return times and steps in the heartbeat PATH, oldest first: two, or else the file's own.

    Updates have times of their own: the file is written once more when the rank ends.
    """
    words = (reading.content(path, _MOST) or b"").split()
    if not words or not words[0].isdigit():
        return ()
    if len(words) == _WORDS and words[1] == b"update":
        try:
            first, last = ((float(words[n + 1]), int(words[n])) for n in (2, 4))
        except ValueError:
            return ()
        return (first,) if first == last else (first, last)
    try:
        return ((os.stat(path).st_mtime, int(words[0])),)
    except OSError:
        return ()


def beat(path: str, since_ns: int) -> int:
    """Return a number that changes with each heartbeat; 0 if there is none since SINCE_NS."""
    try:
        status = os.stat(path)
    except OSError:
        return 0
    return status.st_mtime_ns if status.st_mtime_ns >= since_ns else 0
