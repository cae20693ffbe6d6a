"""Checks this host for one job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from fleetrun import printing
from fleetrun.doctor import (
    checked_job,
    gpu_check,
    gpus,
    machine,
    network,
    peers,
    software,
)
from fleetrun.doctor.findings import Finding
from fleetrun.model import Request

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
