"""A finding: what was observed, its severity, its consequence and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

OK, WARNING, ERROR = "ok", "warning", "error"
# The exit code of every error about the host.
UNFIT = 3


class Finding(NamedTuple):
    """One finding: `check` names what was examined, `seen` says what was observed.

    `means` is the consequence for a job, `fix` a command; both are empty if all is well.
    """

    check: str
    level: str
    seen: str
    means: str = ""
    fix: str = ""


def ok(check: str, seen: str) -> Finding:
    """Return the finding that CHECK found nothing wrong."""
    return Finding(check, OK, seen)


def warning(check: str, seen: str, means: str, fix: str) -> Finding:
    """Return the finding that a job may run, but not as well as it could."""
    return Finding(check, WARNING, seen, means, fix)


def error(check: str, seen: str, means: str, fix: str) -> Finding:
    """Return the finding that a job will not run, or not to its end."""
    return Finding(check, ERROR, seen, means, fix)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 3 if one of FINDINGS is an error, else 0.

    >>> exit_code([ok("a", "b")]), exit_code([error("a", "b", "c", "d")])
    (0, 3)
    """
    return UNFIT if any(finding.level == ERROR for finding in findings) else 0
