"""`fleetrun doctor` on several hosts at once, by ssh."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from fleetrun.host.probe import current_folder
from fleetrun.model import Request
from fleetrun.remote import ssh, sshjob
from fleetrun.remote.ssh import HostOrder

# How long ssh and a check-up of one host may take, beside the wait for the others.
_LIMIT_S = 120.0


def examine(
    request: Request, environ: Mapping[str, str], options: Sequence[str], *, timeout_s: float
) -> dict[str, tuple[int, str]]:
    """Check all hosts that REQUEST lists, with the OPTIONS of `fleetrun doctor`.

    They connect to each other for TIMEOUT_S seconds. Returns for each its exit code, and what the
    check-up has printed or why there is none. Raises UsageError for contradictory lists of hosts,
    EnvironmentFault if there is no ssh here.
    """
    hosts = sshjob.listed(request)
    program = ssh.words_of(request)
    sent, addresses = sshjob.forwarded(environ), ssh.addresses(program, hosts)

    def ask(index: int) -> tuple[int, str]:
        words = ("doctor", *options, *sshjob.arguments(request, hosts[index], addresses, index))
        try:
            done = subprocess.run(
                ssh.command(program, hosts[index]),
                input=HostOrder(current_folder(), sent, words, attended=False).line(),
                capture_output=True,
                timeout=timeout_s + _LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            return ssh.SSH_FAULT, f"no answer within {error.timeout:g} s"
        except OSError as error:
            return ssh.SSH_FAULT, f"--ssh: {error.strerror}"
        if ssh.MARK in done.stderr and done.stdout:
            return done.returncode, done.stdout.decode(errors="replace")
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return done.returncode, ssh.why(done.returncode, last)

    with ThreadPoolExecutor(max_workers=64) as pool:
        checked = pool.map(ask, range(len(hosts)))
        return {host.name: answer for host, answer in zip(hosts, checked, strict=True)}
