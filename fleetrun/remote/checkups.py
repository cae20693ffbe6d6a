"""Check-ups of all hosts of a job at once: `fleetrun doctor --json` on each, by ssh."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fleetrun.doctor.findings import Finding, error
from fleetrun.doctor.output import KEYS
from fleetrun.model import Request
from fleetrun.probe import current_folder
from fleetrun.records import reading
from fleetrun.remote import sshjob
from fleetrun.remote.everywhere import Everywhere
from fleetrun.remote.protocol import Inquiry
from fleetrun.remote.sshconnection import ssh_command

# How long ssh and a check-up of one host may take, and an allreduce.
_START_S, _ALLREDUCE_S = 60.0, 240.0


class HostReport(NamedTuple):
    """The findings about a host, and their JSON document (None if there is none)."""

    host: str
    findings: tuple[Finding, ...]
    document: dict[str, object] | None = None


def examine(
    request: Request,
    environ: Mapping[str, str],
    options: Sequence[str],
    *,
    timeout_s: float,
    log: Callable[[str], None] | None = None,
) -> list[HostReport]:
    """Check all hosts that REQUEST lists, with the OPTIONS of `fleetrun doctor`.

    They connect to each other for TIMEOUT_S seconds. Raises UsageError for contradictory lists of
    hosts, EnvironmentFault if there is no ssh here.
    """
    hosts = sshjob.listed(request)
    if log is not None:
        log(f"Checking {len(hosts)} hosts by ssh; they meet within {timeout_s:g} s.")
    limit_s = timeout_s + (_ALLREDUCE_S if "--allreduce" in options else _START_S)

    def words(addresses: Sequence[str], me: int) -> Sequence[str]:
        host_words = sshjob.arguments(request, hosts[me], addresses, me)
        return ("doctor", "--json", *options, *host_words)

    inquiry = Inquiry(current_folder(), environ=sshjob.forwarded(environ))
    everywhere = Everywhere(hosts, ssh_command(request), inquiry, words, limit_s)
    return [
        _report(host.name, output, failure)
        for host, (output, failure) in zip(hosts, everywhere.results(), strict=True)
    ]


def _report(host: str, output: bytes, failure: str) -> HostReport:
    """Return the findings in the OUTPUT of HOST; missing output is a finding."""
    document = reading.parse(output[output.find(b"{") :] if b"{" in output else None)
    if document is None:
        return HostReport(
            host,
            (
                error(
                    failure.partition(": ")[0] or "fleetrun",
                    f"the check-up gives no result ({failure.partition(': ')[2]})",
                    "a launch with --hosts needs ssh without a password, the same Python, the same "
                    "fleetrun and the same folder there",
                    f"ssh {host} {sys.executable} -m fleetrun --version",
                ),
            ),
        )
    findings = tuple(
        Finding(*(reading.text(record.get(key)) for key in KEYS))
        for record in reading.mappings(document.get("findings"))
    )
    return HostReport(host, findings, document)


def merged(reports: Sequence[HostReport]) -> list[Finding]:
    """Return the findings of all REPORTS, prefixed with their hosts; equal ones are merged.

    >>> from fleetrun.doctor.findings import ok
    >>> [finding.seen for finding in merged([
    ...     HostReport("a", (ok("Paddle", "3.3.1"), ok("memory", "8 GiB"))),
    ...     HostReport("b", (ok("Paddle", "3.3.1"), ok("memory", "4 GiB"))),
    ... ])]
    ['all 2 hosts: 3.3.1', 'a: 8 GiB', 'b: 4 GiB']
    """
    order: dict[str, None] = {}
    hosts: dict[Finding, list[str]] = {}
    for report in reports:
        for finding in report.findings:
            order.setdefault(finding.check)
            hosts.setdefault(finding, []).append(report.host)
    return [
        finding._replace(seen=f"{_named(names, len(reports))}: {finding.seen}")
        for check in order
        for finding, names in hosts.items()
        if finding.check == check
    ]


def _named(names: Sequence[str], count: int) -> str:
    if len(names) == count > 1:
        return f"all {count} hosts"
    return ", ".join(dict.fromkeys(names))
