"""Check-ups of all hosts of a job at once: `fleetrun doctor --json` on each, by ssh."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.doctor import output
from fleetrun.doctor.findings import Finding, error
from fleetrun.plan import hosts
from fleetrun.probe import current_folder
from fleetrun.records import reading
from fleetrun.remote import head
from fleetrun.remote.connection import OPTIONS, ssh_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fleetrun.model import Request
    from fleetrun.plan.hostfile import HostEntry

# So long ssh and Python may take to start, and a check-up without its peers; and an allreduce.
_START_S, _ALLREDUCE_S = 60.0, 240.0
# What the other end runs: folder, variables and words come on its standard input, so that nobody
# sees them in a list of processes. It says first at which address ssh has reached it.
_BOOTSTRAP = (
    "import json, os, sys\n"
    "print('fleetrun address', (os.environ.get('SSH_CONNECTION', '').split() + [''] * 3)[2])\n"
    "sys.stdout.flush()\n"
    "told = json.loads(sys.stdin.readline() or '{}')\n"
    "if told:\n"
    "    os.chdir(told['folder'])\n"
    "    os.environ.update(told['environ'])\n"
    "    os.execv(sys.executable, [sys.executable, '-m', 'fleetrun', *told['words']])\n"
)
# A check-up is some kilobytes.
_MOST, _CHUNK = 1 << 22, 1 << 16
# What ssh exits with by its own fault, ssh(1).
_SSH = 255
_ADDRESS = b"fleetrun address "


class HostReport(NamedTuple):
    """What the check-up of a host found, and its whole JSON document (None: there is none)."""

    host: str
    findings: tuple[Finding, ...]
    document: dict[str, object] | None = None


def examine(
    request: Request,
    environ: Mapping[str, str],
    options: Sequence[str],
    *,
    timeout_s: float,
    say: Callable[[str], None] | None = None,
) -> list[HostReport]:
    """Check all hosts that REQUEST lists, with the OPTIONS of `fleetrun doctor`.

    They meet each other within TIMEOUT_S seconds. UsageError for lists that make no sense,
    EnvironmentFault where there is no ssh here.
    """
    entries = head.listed(request)
    ssh = ssh_command(request)
    if say is not None:
        say(f"Checking {len(entries)} hosts by ssh; they meet within {timeout_s:g} s.")
    limit_s = timeout_s + (_ALLREDUCE_S if "--allreduce" in options else _START_S)

    def ask(one: tuple[HostEntry, dict[str, object] | None]) -> tuple[int, bytes, str]:
        return _ask([*ssh, *OPTIONS, one[0].target], one[1], limit_s)

    # All at the same time: a host waits for the others.
    with ThreadPoolExecutor(len(entries)) as pool:
        found = list(pool.map(ask, [(host, None) for host in entries]))
        addresses = [
            _address(said) or host.name for host, (_, said, _) in zip(entries, found, strict=True)
        ]
        orders = [
            {
                "folder": current_folder(),
                "environ": head.forwarded(environ),
                "words": [
                    "doctor",
                    "--json",
                    *options,
                    *head.arguments(request, host, addresses, me),
                ],
            }
            for me, host in enumerate(entries)
        ]
        reached = [code == 0 for code, _, _ in found]
        answers = iter(
            pool.map(
                ask,
                [
                    (host, order)
                    for host, order, is_there in zip(entries, orders, reached, strict=True)
                    if is_there
                ],
            )
        )
        found = [
            next(answers) if is_there else one for one, is_there in zip(found, reached, strict=True)
        ]
    return [_report(host.name, *one) for host, one in zip(entries, found, strict=True)]


def _ask(
    ssh: Sequence[str], order: Mapping[str, object] | None, limit_s: float
) -> tuple[int, bytes, str]:
    """Return the exit code, the output and the last words of the other end that gets ORDER."""
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(_BOOTSTRAP)}"
    text = b"" if order is None else json.dumps(order).encode() + b"\n"
    try:
        process = subprocess.Popen(
            [*ssh, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as fault:
        return -1, b"", os.strerror(fault.errno or 0)
    with process:
        said, noted, trouble = _heard(process, text, limit_s)
        if trouble:
            process.kill()
    lines = noted.decode(errors="replace").strip().splitlines()
    code = process.returncode
    return code, said, trouble or (lines[-1] if lines else f"exit code {code}")


def _heard(
    process: subprocess.Popen[bytes], text: bytes, limit_s: float
) -> tuple[bytes, bytes, str]:
    """Give PROCESS the TEXT, and return its output, its errors, and why not all of it was heard."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with suppress(BrokenPipeError):
        process.stdin.write(text)
        process.stdin.close()
    parts: dict[int, bytearray] = {
        stream.fileno(): bytearray() for stream in (process.stdout, process.stderr)
    }
    out, err = parts.values()
    until = time.monotonic() + limit_s
    trouble = ""
    with selectors.DefaultSelector() as selector:
        for fd in parts:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and not trouble:
            for key, _ in selector.select(max(until - time.monotonic(), 0.0)):
                part = os.read(key.fd, _CHUNK)
                parts[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
            if len(out) + len(err) > _MOST:
                trouble = "it says too much"
            elif time.monotonic() >= until:
                trouble = f"no answer within {limit_s:g} s"
    return bytes(out), bytes(err), trouble


def _address(said: bytes) -> str:
    """Return the address at which ssh has reached the host that SAID this."""
    lines = [line for line in said.splitlines() if line.startswith(_ADDRESS)]
    word = lines[-1][len(_ADDRESS) :].decode(errors="replace").strip() if lines else ""
    # An sshd that is no daemon of the network knows none.
    return word if hosts.is_address(word) else ""


def _report(host: str, code: int, said: bytes, last: str) -> HostReport:
    """Return what HOST has SAID; that it said nothing is a finding."""
    document = reading.parse(said[said.find(b"\n{") + 1 :] if b"\n{" in said else None)
    if document is None:
        return HostReport(
            host,
            (
                error(
                    "ssh" if code < 0 or code == _SSH else "fleetrun",
                    f"the check-up gives no result ({last})",
                    "a launch with --hosts needs ssh without a password, the same Python, the same "
                    "fleetrun and the same folder there",
                    f"ssh {host} {sys.executable} -m fleetrun --version",
                ),
            ),
        )
    findings = tuple(
        Finding(*(reading.text(one.get(key)) for key in output.KEYS))
        for one in reading.mappings(document.get("findings"))
    )
    return HostReport(host, findings, document)


def merged(reports: Sequence[HostReport]) -> list[Finding]:
    """Return the findings of all REPORTS in one list, each with its hosts; alike ones are one.

    >>> from fleetrun.doctor.findings import ok
    >>> [one.seen for one in merged([
    ...     HostReport("a", (ok("Paddle", "3.3.1"), ok("memory", "8 GiB"))),
    ...     HostReport("b", (ok("Paddle", "3.3.1"), ok("memory", "4 GiB"))),
    ... ])]
    ['all 2 hosts: 3.3.1', 'a: 8 GiB', 'b: 4 GiB']
    """
    order: dict[str, None] = {}
    hosts: dict[Finding, list[str]] = {}
    for report in reports:
        for one in report.findings:
            order.setdefault(one.check)
            hosts.setdefault(one, []).append(report.host)
    return [
        one._replace(seen=f"{_named(names, len(reports))}: {one.seen}")
        for check in order
        for one, names in hosts.items()
        if one.check == check
    ]


def _named(names: Sequence[str], count: int) -> str:
    if len(names) == count > 1:
        return f"all {count} hosts"
    return ", ".join(dict.fromkeys(names))
