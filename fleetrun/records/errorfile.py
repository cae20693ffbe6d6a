"""Reading `error.RANK.json`, in which a rank records the exception that ended it.

Any program may write one to $FLEETRUN_ERROR_FILE; Python ranks do it by themselves. It may be
half-written, or something else altogether: what can be read is returned.
"""

from typing import NamedTuple

from fleetrun.records import reading

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
    said = reading.content(path, _MOST)
    if said is None:
        return None
    found = reading.parse(said)
    if found is None:
        return ErrorReport(raw=said.decode(errors="replace"))
    return reading.record(ErrorReport, found, kind=reading.text(found.get("class")), raw="")
