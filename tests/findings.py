"""The problems among findings of `fleetrun doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.doctor.findings import OK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleetrun.doctor.findings import Finding


def bad(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Return check and level of the problems in FINDINGS, which all have a meaning and a fix."""
    wrong = [finding for finding in findings if finding.level != OK]
    assert all(finding.means and finding.fix for finding in wrong)
    return [(finding.check, finding.level) for finding in wrong]
