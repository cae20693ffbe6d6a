"""`report.json`, about a job that failed or was restarted.

It has schema 1 and is for programs; keys may be added. Nothing of any environment is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fleetrun.rundir import names, reading
from fleetrun.rundir.folder import Folder

SCHEMA = 1


class ProcessEnd(NamedTuple):
    """How a process ended: the culprit, or one that ended because of it (`how` says why)."""

    process: str = ""
    rank: int | None = None
    pid: int | None = None
    attempt: int = 0
    code: int | None = None
    signal: str | None = None
    # Why it could not be started.
    fault: str | None = None
    host: str = ""
    devices: str = ""
    # Seconds since 1970, and since the job began.
    time: float = 0.0
    after_s: float = 0.0
    # The exception's class, message and traceback.
    class_: str = ""
    message: str = ""
    stack: str = ""
    log: str = ""
    last_words: tuple[str, ...] = ()
    # The name of the known failure, and what to do about it.
    known: str | None = None
    remedy: str = ""
    peak_bytes: int | None = None
    # Of one that is no culprit: stopped, peer lost, or nothing.
    how: str = ""


class RestartRecord(NamedTuple):
    """How long it took until the ranks of ATTEMPT ran, since the failure that WHY names."""

    attempt: int
    seconds: float
    why: str


class ReportRecord(NamedTuple):
    """A job; `evidence` and `earlier`, what ended the attempts before, are sentences."""

    outcome: str = ""
    exit_code: int | None = None
    attempts: int = 1
    time: float = 0.0
    culprit: ProcessEnd | None = None
    victims: tuple[ProcessEnd, ...] = ()
    evidence: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    restarts: tuple[RestartRecord, ...] = ()


def write(folder: Folder, report: ReportRecord, redact: Callable[[str], str] = str) -> None:
    """Write REPORT into FOLDER, whole or not at all; OSError if that fails."""
    folder.write_json(names.REPORT, {"schema": SCHEMA, **reading.plain(report)}, redact)


def read(path: str) -> ReportRecord | None:
    """Return the readable content of the file PATH; None if it is not a report."""
    document = reading.document(path) or {}
    if document.get("schema") != SCHEMA:
        return None
    culprit, victims = document.get("culprit"), (document.get("victims") or ())
    restarts = document.get("restarts") or ()
    return reading.record(
        ReportRecord,
        document,
        culprit=reading.record(ProcessEnd, culprit) if culprit else None,
        victims=tuple(reading.record(ProcessEnd, victim) for victim in victims),
        restarts=tuple(reading.record(RestartRecord, restart) for restart in restarts),
    )
