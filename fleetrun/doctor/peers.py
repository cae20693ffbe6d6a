"""Whether the hosts of a job reach each other on its ports, by plain TCP connections.

Each host listens on its own ports and connects to those of all others, as launchers and ranks do.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.model import Member

# How long a connection may take, and the pause before the next attempt.
_CONNECT_S, _AGAIN_S = 1.0, 0.1
# How many connections are tried at once.
_AT_ONCE = 64
REFUSED = "refuses the connection: the host is up, but nothing listens"


def check(job: CheckedJob) -> Iterator[Finding]:
    """Connect to the check-ups of the job's other hosts on its ports."""
    if job.roster is None or not job.has_peers:
        return
    me, until = job.roster.me, time.monotonic() + job.timeout_s
    others = [host for index, host in enumerate(job.members) if index != me]
    if job.log is not None:
        job.log(f"Connecting to the other hosts for up to {job.timeout_s:g} s.")
    targets = [(host.host, port) for host in others for port in host.ports]
    own_ports = job.members[me].ports
    with ExitStack() as stack, ThreadPoolExecutor(_AT_ONCE + len(own_ports)) as pool:
        answers = [
            pool.submit(_accept, stack.enter_context(server), len(others), until)
            for port in own_ports
            if (server := _listening(port)) is not None
        ]
        outcomes = dict(
            zip(targets, pool.map(partial(_connect, until=until), targets), strict=True)
        )
        # They have to reach this host, too.
        for answer in answers:
            answer.result()
    yield from judge(others, outcomes)


def _listening(port: int) -> socket.socket | None:
    # A port that is taken is a finding of its own.
    with suppress(OSError):
        return socket.create_server(
            ("", port), backlog=socket.SOMAXCONN, family=socket.AF_INET6, dualstack_ipv6=True
        )
    with suppress(OSError):
        return socket.create_server(("", port), backlog=socket.SOMAXCONN)
    return None


def _accept(server: socket.socket, callers: int, until: float) -> None:
    """Answer as many CALLERS."""
    for _ in range(callers):
        server.settimeout(max(0.001, until - time.monotonic()))
        try:
            server.accept()[0].close()
        except OSError:
            return


def _connect(target: tuple[str, int], *, until: float) -> str:
    """Return why TARGET cannot be connected to UNTIL then; empty: it can."""
    while True:
        try:
            socket.create_connection(target, timeout=_CONNECT_S).close()
        except ConnectionRefusedError:
            why = REFUSED
        except TimeoutError:
            why = f"no answer within {_CONNECT_S:g} s (is a firewall in between?)"
        except OSError as fault:
            why = (fault.strerror or str(fault)).lower()
        else:
            return ""
        if time.monotonic() >= until:
            return why
        time.sleep(_AGAIN_S)


def judge(others: Sequence[Member], outcomes: Mapping[tuple[str, int], str]) -> Iterator[Finding]:
    """Yield the findings about the connections to OTHERS, whose OUTCOMES say what failed."""
    for host in others:
        whys = {port: outcomes[host.host, port] for port in host.ports}
        for why in filter(None, dict.fromkeys(whys.values())):
            ports = [port for port, outcome in whys.items() if outcome == why]
            where = f"{host.host}:{', '.join(map(str, ports))}"
            if why == REFUSED:
                yield warning(
                    "connection",
                    f"{where} {why}",
                    "`fleetrun doctor` does not run there at the same time, or a firewall rejects",
                    f"ssh {host.host} fleetrun doctor ...  # the same command on every host",
                )
                continue
            yield error(
                "connection",
                f"{where}: {why}",
                "a firewall drops the packets, or the host is down; ranks would wait forever",
                f"nc -vz {host.host} {ports[0]}  # open the ports between the hosts of the job",
            )
        if not any(whys.values()):
            count = len(host.ports)
            yield ok("connection", f"{host.host} answers on {count} of {count} ports")
