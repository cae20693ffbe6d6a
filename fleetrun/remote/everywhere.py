"""`fleetrun doctor` and `ps` on several hosts at once, by ssh."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fleetrun.doctor.findings import Finding, error
from fleetrun.doctor.output import KEYS
from fleetrun.host.probe import current_folder
from fleetrun.model import Request
from fleetrun.plan.hostfile import HostEntry
from fleetrun.remote import ssh, sshjob
from fleetrun.remote.ssh import SSH_FAULT, HostOrder, SshConnection
from fleetrun.run.loop import Loop
from fleetrun.rundir import reading

# The most bytes of output; a command prints kilobytes.
_MOST = 1 << 22
# How long ssh and a check-up of one host may take, and an allreduce.
_START_S, _ALLREDUCE_S = 60.0, 240.0


def run(
    words: Sequence[str], hosts: Sequence[HostEntry], orders: Sequence[HostOrder], limit_s: float
) -> list[tuple[bytes, str]]:
    """Run ORDERS on HOSTS by the ssh WORDS, for LIMIT_S seconds at most.

    Return the output of each, and why it failed (empty if it did not).
    """
    loop = Loop()
    output = {host: bytearray() for host in hosts}

    def take(connection: SshConnection, fd: int, part: bytes) -> None:
        if fd == 1:
            output[connection.host] += part
            if len(output[connection.host]) > _MOST:
                connection.give_up("it prints too much")

    def give_up(why: str) -> None:
        for connection in connections:
            connection.give_up(why)

    def beat() -> None:
        # The programs there end when they hear nothing.
        for connection in connections:
            connection.send(b"\n")
        loop.timer("heartbeat", time.monotonic() + ssh.HEARTBEAT_S, beat)

    connections = [
        SshConnection(
            loop, host, ssh.command(words, host), order, output=take, changed=lambda _: None
        )
        for host, order in zip(hosts, orders, strict=True)
    ]
    beat()
    loop.timer("limit", time.monotonic() + limit_s, lambda: give_up(f"no answer in {limit_s:g} s"))
    try:
        for connection in connections:
            connection.open()
        while any(connection.code is None for connection in connections):
            loop.turn()
    finally:
        give_up("interrupted")
        loop.close()
    return [(bytes(output[connection.host]), _failure(connection)) for connection in connections]


def _failure(connection: SshConnection) -> str:
    if not connection.code:
        return ""
    is_of_fleetrun = connection.is_up or connection.code != SSH_FAULT
    if connection.fault or not is_of_fleetrun or connection.status in {SSH_FAULT, -signal.SIGKILL}:
        return f"ssh: {connection.why().removeprefix('ssh: ')}"
    return f"fleetrun: {connection.last or f'exit code {connection.code}'}"


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
    words = ssh.words_of(request)
    addresses = ssh.addresses(words, hosts)
    order = HostOrder(current_folder(), sshjob.forwarded(environ))
    orders = [
        order._replace(
            words=(
                *("doctor", "--json", *options),
                *sshjob.arguments(request, host, addresses, index),
            )
        )
        for index, host in enumerate(hosts)
    ]
    return [
        _report(host.name, output, failure)
        for host, (output, failure) in zip(hosts, run(words, hosts, orders, limit_s), strict=True)
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
