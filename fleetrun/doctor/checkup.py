"""Checks this host for one job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from fleetrun import printing
from fleetrun.doctor import (
    checked_job,
    findings,
    gpu_check,
    gpus,
    machine,
    network,
    peers,
    software,
)
from fleetrun.doctor.findings import Finding
from fleetrun.errors import EnvironmentFault
from fleetrun.model import Request
from fleetrun.rundir import secrets

# Launches by hand on several hosts start some seconds apart.
_PREFLIGHT_S = 20.0

# Each yields its findings about a CheckedJob; they stand in this order.
CHECKS = (
    checked_job.check,
    gpus.check,
    software.command,
    software.paddle,
    gpu_check.check,
    machine.shared_memory,
    machine.logs,
    machine.open_files,
    machine.processes,
    machine.memory,
    network.host_names,
    network.interface,
    network.ports,
    peers.check,
)


def examine(
    request: Request,
    environ: Mapping[str, str],
    *,
    timeout_s: float,
    log: Callable[[str], None] | None = None,
) -> tuple[Finding, ...]:
    """Check this host for the job of REQUEST; with other hosts, wait TIMEOUT_S seconds for theirs.

    LOG gets a line about what takes longer than a second. Raises UsageError if the request is
    invalid, EnvironmentFault if the current folder is gone.
    """
    job = checked_job.read(request, environ, timeout_s, log)
    return tuple(finding for check in CHECKS for finding in check(job))


def remark(environ: Mapping[str, str]) -> Callable[[str], None] | None:
    """Return a function that shows progress on a terminal; None in pipes and CI."""
    if environ.get("CI") or sys.stderr is None or not sys.stderr.isatty():
        return None
    return printing.remark


def preflight(request: Request, environ: Mapping[str, str]) -> None:
    """Print findings on standard error; EnvironmentFault if any would end the job."""
    results = examine(request, environ, timeout_s=_PREFLIGHT_S, log=remark(environ))
    redact = secrets.of_launch(request, environ)
    grave = [finding for finding in results if finding.level == findings.ERROR]
    shown = grave if request.quiet else results
    for finding in shown:
        if finding.level != findings.OK:
            text = f"{finding.check}: {finding.seen}; {finding.means}; fix: {finding.fix}"
            printing.remark(f"{finding.level}: {redact(text)}")
    if grave:
        count = "one thing" if len(grave) == 1 else f"{len(grave)} things"
        raise EnvironmentFault(
            f"--preflight: {count} would end the job, so nothing was started; "
            "`fleetrun doctor` shows all."
        )
