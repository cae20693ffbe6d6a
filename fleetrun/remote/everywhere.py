"""`fleetrun doctor` on several hosts at once, by ssh."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from fleetrun.host.probe import current_folder
from fleetrun.model import Request
from fleetrun.remote import ssh, sshjob
from fleetrun.remote.ssh import HostOrder

# How long ssh and a check-up of one host may take, and an allreduce.
_START_S, _ALLREDUCE_S = 60.0, 240.0
_AT_ONCE = 64


class HostReport(NamedTuple):
    """What the check-up of a host has printed, and why there is none (empty: there is one)."""

    host: str
    code: int
    output: str
    failure: str = ""


def examine(
    request: Request, environ: Mapping[str, str], options: Sequence[str], *, timeout_s: float
) -> list[HostReport]:
    """Check all hosts that REQUEST lists, with the OPTIONS of `fleetrun doctor`.

    They connect to each other for TIMEOUT_S seconds. Raises UsageError for contradictory lists of
    hosts, EnvironmentFault if there is no ssh here.
    """
    hosts = sshjob.listed(request)
    limit_s = timeout_s + (_ALLREDUCE_S if "--allreduce" in options else _START_S)
    program = ssh.words_of(request)
    order = HostOrder(current_folder(), sshjob.forwarded(environ), attended=False)
    addresses = ssh.addresses(program, hosts)

    def ask(index: int) -> HostReport:
        host = hosts[index]
        words = ("doctor", *options, *sshjob.arguments(request, host, addresses, index))
        try:
            done = subprocess.run(
                ssh.command(program, host),
                input=ssh.line(order._replace(words=words)),
                capture_output=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return HostReport(host.name, ssh.SSH_FAULT, "", f"no answer within {limit_s:g} s")
        except OSError as error:
            return HostReport(host.name, ssh.SSH_FAULT, "", f"--ssh: {error.strerror}")
        output, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        lines = errors.strip().splitlines()
        has_run = done.returncode >= 0 and ssh.MARK.decode() in errors and output.strip()
        failure = "" if has_run else ssh.why(done.returncode, lines[-1] if lines else "")
        return HostReport(host.name, done.returncode, output, failure)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(ask, range(len(hosts))))
