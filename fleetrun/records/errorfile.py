"""Reading `error.RANK.json`, in which a rank leaves word of the exception that ended it.

Any program may write one to $FLEETRUN_ERROR_FILE; Python ranks do it by themselves. It may be
half-written, or something else altogether: what can be read is returned.
"""

# pathlib costs start-up time.
# ruff: noqa: PTH123

import os
from typing import NamedTuple

_MOST = 1024 * 1024


class ErrorReport(NamedTuple):
    """What a rank said: `raw` is all of it when it is not what we expect."""

    rank: int | None = None
    host: str = ""
    pid: int | None = None
    # Wall clock, in seconds.
    time: float | None = None
    restart: int = 0
    # The exception's class.
    kind: str = ""
    message: str = ""
    # The traceback as Python prints it.
    stack: str = ""
    raw: str = ""
    # On the clock that all processes of a host share.
    monotonic: float | None = None
    # Of a failing sys.exit: the exit code.
    code: int | None = None


def read_error(path: str) -> ErrorReport | None:
    """Return what the file PATH says; None if there is none."""
    try:
        # A pipe or a link that somebody has put there is no report.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            text = file.read(_MOST)
    except OSError:
        return None
    import json  # noqa: PLC0415 - only after a failure

    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        return ErrorReport(raw=text.decode(errors="replace"))
    return ErrorReport(
        rank=_whole(said.get("rank")),
        host=_text(said.get("host")),
        pid=_whole(said.get("pid")),
        time=_real(said.get("time")),
        restart=_whole(said.get("restart")) or 0,
        kind=_text(said.get("class")),
        message=_text(said.get("message")),
        stack=_text(said.get("stack")),
        monotonic=_real(said.get("monotonic")),
        code=_whole(said.get("code")),
    )


def _text(value: object) -> str:
    """Return VALUE as text that can be printed anywhere."""
    text = "" if value is None else str(value)
    return text.encode(errors="backslashreplace").decode()


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _real(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
