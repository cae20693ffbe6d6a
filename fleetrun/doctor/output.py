"""Findings as text for people and as JSON for programs; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetrun.doctor.findings import ERROR, OK, WARNING, Finding, exit_code
from fleetrun.text import counted, wrapped

SCHEMA = 1
# The keys of a finding in a document, in the order of its fields.
KEYS = ("check", "level", "seen", "means", "mend")
_COLORS = {OK: "\x1b[32m", WARNING: "\x1b[33m", ERROR: "\x1b[1;31m"}
_END = "\x1b[0m"
_NARROWEST = 24


def text(findings: Sequence[Finding], *, width: int = 0, is_coloured: bool = False) -> str:
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
    counts = {level: sum(finding.level == level for finding in findings) for level in _COLORS}
    lines.append(
        f"{counts[OK]} ok, {counted(counts[WARNING], WARNING)}, {counted(counts[ERROR], ERROR)}"
    )
    return "\n".join(lines) + "\n"


def document(host: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return FINDINGS of HOST as one JSON object.

    Its keys: schema, host, exit_code, and findings (each with check, level, seen, means, mend).
    """
    return {
        "schema": SCHEMA,
        "host": host,
        "exit_code": exit_code(findings),
        # In schema 1, `fix` is called `mend`.
        "findings": [dict(zip(KEYS, finding, strict=True)) for finding in findings],
    }
