"""What findings of `fleetrun doctor` say is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.doctor.findings import OK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleetrun.doctor.findings import Finding


def bad(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Return check and level of what is wrong in FINDINGS, which say what it means and its fix."""
    wrong = [finding for finding in findings if finding.level != OK]
    assert all(finding.means and finding.fix for finding in wrong)
    return [(finding.check, finding.level) for finding in wrong]
