"""The heartbeat file of a rank: any script may write its step there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from fleetrun.rundir import reading

_MOST = 128
_WORDS = 6


class ReportedStep(NamedTuple):
    """The content of a heartbeat file: `echo 120 > $FLEETRUN_HEARTBEAT`, or that of our callback.

    POINTS are times in seconds since 1970 and the step that was over at each, the newest last.
    """

    step: int
    points: tuple[tuple[float, int], ...]
    # Whether the script wrote it, and not our callback after an update.
    is_scripts: bool = True


def read(path: str) -> ReportedStep | None:
    """Return the heartbeat in the file PATH, if any."""
    words = (reading.content(path, _MOST) or b"").strip().partition(b"\n")[0].split()
    # A file that is being written has no number yet.
    if not words or not words[0].isdigit():
        return None
    step = int(words[0])
    if words[1:2] != [b"update"]:
        return ReportedStep(step, ((reading.written_at(path), step),))
    # Updates have times of their own: the file is written once more when the rank ends.
    pairs = ((2, 3), (4, 5)) if len(words) == _WORDS else ()
    points = dict.fromkeys((float(words[time]), int(words[update])) for update, time in pairs)
    return ReportedStep(step, tuple(points), is_scripts=False)


def beat(path: str, since_ns: int) -> int:
    """Return a number that changes with each heartbeat; 0 if there is none since SINCE_NS."""
    try:
        written_ns = os.stat(path).st_mtime_ns
    except OSError:
        return 0
    return written_ns if written_ns >= since_ns else 0


def last_step(paths: Iterable[str]) -> int | None:
    """Return the highest of the steps in PATHS, of which few may exist; None without any."""
    beats = [read(path) for path in filter(None, paths)]
    return max((beat.step for beat in beats if beat is not None), default=None)
