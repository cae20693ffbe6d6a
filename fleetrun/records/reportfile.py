"""`report.json`, what is known about a job that failed or was restarted, for programs; schema 1.

`schema`, `outcome`, `exit_code`, `attempts`, `time`, and where a process is to blame `culprit`,
`victims` and `evidence`; `earlier` has what ended the attempts before, `restarts` how long it took
until they ran again. Nothing of any environment is in it. Keys may be added; the schema goes up
when one changes its meaning or goes away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fleetrun.records import names, reading
from fleetrun.records.folder import Folder

SCHEMA = 1


class EndRecord(NamedTuple):
    """How a process ended: `code` by itself, or by a `signal` (its name)."""

    process: str = ""
    rank: int | None = None
    pid: int | None = None
    attempt: int = 0
    code: int | None = None
    signal: str | None = None
    # Why it could not be started.
    fault: str | None = None


class VictimRecord(NamedTuple):
    """A process that ended because of the culprit; `how` is stopped, peer lost, or nothing."""

    end: EndRecord
    after_s: float = 0.0
    how: str = ""


class CulpritRecord(NamedTuple):
    """The process that failed first."""

    end: EndRecord
    host: str = ""
    devices: str = ""
    # Seconds since 1970, and since the job began.
    time: float = 0.0
    after_s: float = 0.0
    # The exception's class (`class` in the file), message and traceback; `raw`: of a broken file.
    kind: str = ""
    message: str = ""
    stack: str = ""
    raw: str = ""
    log: str = ""
    last_words: tuple[str, ...] = ()
    # The name of the known failure, and what to do about it.
    known: str | None = None
    remedy: str = ""
    peak_bytes: int | None = None


class ReportRecord(NamedTuple):
    """All of the file; `evidence` and `earlier` are sentences."""

    outcome: str = ""
    exit_code: int | None = None
    attempts: int = 1
    time: float = 0.0
    culprit: CulpritRecord | None = None
    victims: tuple[VictimRecord, ...] = ()
    evidence: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    # Each with its attempt, seconds, and why.
    restarts: tuple[Mapping[str, Any], ...] = ()


def write(folder: Folder, report: ReportRecord, redact: Callable[[str], str] = str) -> None:
    """Write REPORT into FOLDER, whole or not at all; OSError if that fails."""
    culprit = report.culprit
    document = {
        "schema": SCHEMA,
        **report._asdict(),
        "culprit": None if culprit is None else _flat(culprit),
        "victims": [_flat(victim) for victim in report.victims],
    }
    folder.write_json(names.REPORT, document, redact)


def _flat(record: CulpritRecord | VictimRecord) -> dict[str, object]:
    """Return RECORD in the file's form: the end's fields inline, `kind` called `class`."""
    fields = {"class" if key == "kind" else key: value for key, value in record._asdict().items()}
    return {**fields.pop("end")._asdict(), **fields}


def read(path: str) -> ReportRecord | None:
    """Return the readable content of the file PATH; None if it is not a report."""
    document = reading.document(path)
    if document is None or document.get("schema") != SCHEMA:
        return None
    culprit = document.get("culprit")
    return reading.record(
        ReportRecord,
        document,
        culprit=_culprit(culprit) if isinstance(culprit, dict) else None,
        victims=tuple(
            reading.record(VictimRecord, victim, end=reading.record(EndRecord, victim))
            for victim in reading.mappings(document.get("victims"))
        ),
        restarts=tuple(reading.mappings(document.get("restarts"))),
    )


def _culprit(document: Mapping[str, Any]) -> CulpritRecord:
    end, kind = reading.record(EndRecord, document), reading.text(document.get("class"))
    return reading.record(CulpritRecord, document, end=end, kind=kind)
