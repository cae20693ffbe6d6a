"""Findings as text for people and as JSON for programs; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetrun.doctor.allreduce import Measurement, rate
from fleetrun.doctor.findings import ERROR, OK, WARNING, Finding, exit_code
from fleetrun.text import counted, format_size, wrapped

SCHEMA = 1
# The keys of a finding in a document, in the order of its fields.
KEYS = ("check", "level", "seen", "means", "mend")
_COLORS = {OK: "\x1b[32m", WARNING: "\x1b[33m", ERROR: "\x1b[1;31m"}
_END = "\x1b[0m"
_NARROWEST = 24


def text(
    findings: Sequence[Finding],
    measured: Measurement | None = None,
    *,
    width: int = 0,
    is_coloured: bool = False,
) -> str:
    """Return FINDINGS as text, in lines of WIDTH columns; 0: unlimited.

    >>> from fleetrun.doctor.findings import ok, warning
    >>> print(text([ok("port", "free"), warning("clock", "slow", "bad", "fix it")]), end="")
    ok       port   free
    warning  clock  slow
                    effect: bad
                    fix:    fix it
    1 ok, 1 warning, 0 errors
    """
    indent = max(map(len, _COLORS)) + 2
    column = max((len(finding.check) for finding in findings), default=0) + 2 + indent
    room = width - column if width - column >= _NARROWEST else 0
    lines = []
    for finding in findings:
        level = f"{finding.level:<{indent}}"
        if is_coloured:
            level = f"{_COLORS[finding.level]}{level}{_END}"
        first, *more = wrapped(finding.seen, room) or [""]
        lines.append(f"{level}{finding.check:<{column - indent}}{first}")
        lines += [f"{'':{column}}{line}" for line in more]
        for title, prose in (("effect: ", finding.means), ("fix:    ", finding.fix)):
            if prose:
                # A command is copied, so it is never broken.
                is_prose = room and title == "effect: "
                first, *more = wrapped(prose, room - len(title) if is_prose else 0)
                lines.append(f"{'':{column}}{title}{first}")
                lines += [f"{'':{column + len(title)}}{line}" for line in more]
    if measured is not None and measured.rows:
        lines.append(f"allreduce of {measured.ranks} ranks over {measured.backend}:")
        lines.append(f"  {'size':>9}  {'latency':>10}  {'bandwidth':>10}")
        lines += [
            f"  {format_size(row.nbytes):>9}  {row.seconds * 1e6:>7.0f} us"
            f"  {rate(measured.bandwidth(row)):>10}"
            for row in measured.rows
        ]
    counts = {level: sum(finding.level == level for finding in findings) for level in _COLORS}
    lines.append(
        f"{counts[OK]} ok, {counted(counts[WARNING], WARNING)}, {counted(counts[ERROR], ERROR)}"
    )
    return "\n".join(lines) + "\n"


def document(
    host: str, findings: Sequence[Finding], measured: Measurement | None = None
) -> dict[str, Any]:
    """Return FINDINGS of HOST as one JSON object.

    Its keys: schema, host, exit_code, findings (each with check, level, seen, means, mend), and
    allreduce (null, or backend, ranks, and rows of bytes, seconds, bandwidth in B/s and is_right).
    """
    allreduce = None
    if measured is not None and measured.rows:
        allreduce = {
            "backend": measured.backend,
            "ranks": measured.ranks,
            "rows": [
                {
                    "bytes": row.nbytes,
                    "seconds": row.seconds,
                    "bandwidth": measured.bandwidth(row),
                    "is_right": row.is_right,
                }
                for row in measured.rows
            ],
        }
    return {
        "schema": SCHEMA,
        "host": host,
        "exit_code": exit_code(findings),
        # In schema 1, `fix` is called `mend`.
        "findings": [dict(zip(KEYS, finding, strict=True)) for finding in findings],
        "allreduce": allreduce,
    }
