"""Checks of the other hosts of a job: connections, clocks and versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence

from fleetrun import __version__
from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.plan import hosts
from fleetrun.rundir.variables import TOKEN
from fleetrun.session.introductions import HostDescription, Peer, PeerCheck
from fleetrun.session.wire import Key

# Beyond this, certificates, file times and the order of log lines become unreliable.
_CLOCK_S = 1.0
# What must be equal, the consequence if not, and whether that ends the job.
_ALIKE = (
    ("fleetrun", "hosts may plan the job differently", True),
    ("paddle", "ranks may hang at the first allreduce, or differ in their results", True),
    ("nccl", "NCCL refuses to connect different versions", True),
    ("cuda", "kernels and results may differ", False),
    ("python", "one host may be unable to unpickle what another sends", False),
    ("driver", "one host may lack what the others can do", False),
)
_NO_ANSWER = "a firewall drops the packets{or_down}; ranks would wait forever"


def check(job: CheckedJob) -> Iterator[Finding]:
    """Meet the check-ups of the job's other hosts on its ports, and compare them with this one."""
    if job.roster is None or not job.has_peers:
        return
    paddle, me = job.paddle, job.members[job.roster.me].host
    own = HostDescription(
        host=os.uname().nodename,
        fleetrun=__version__,
        python=platform.python_version(),
        paddle="" if paddle is None else paddle.version,
        cuda="" if paddle is None else paddle.cuda,
        nccl="" if paddle is None else paddle.nccl,
        driver="" if job.driver is None else job.driver.driver,
    )
    key = Key(job.request.job_id, job.environ.get(TOKEN))
    meeting = PeerCheck(job.members, job.roster.me, own, key=key, timeout_s=job.timeout_s)
    yield from judge(meeting.run(me if hosts.is_loopback(me) else None, job.log), own)


def judge(peers: Sequence[Peer], own: HostDescription) -> Iterator[Finding]:
    """Yield the findings about PEERS and OWN."""
    for peer in peers:
        yield from _connections(peer)
    answered = [peer for peer in peers if peer.card is not None]
    for peer in answered:
        off = abs(peer.ahead_s)
        if off - peer.accuracy_s <= _CLOCK_S:
            yield ok("clock", f"that of {peer.host} is synchronised with ours")
            continue
        yield warning(
            "clock",
            f"that of {peer.host} is {off:.1f} s {'ahead of' if peer.ahead_s > 0 else 'behind'} "
            "ours",
            "times in the logs of the hosts contradict each other, and certificates may not hold",
            f"ssh {peer.host} chronyc makestep  # and here; or timedatectl set-ntp true",
        )
    if answered:
        yield from _versions(answered, own)


def _connections(peer: Peer) -> Iterator[Finding]:
    check, outcomes = "connection", dict.fromkeys(connect.outcome for connect in peer.connects)
    for outcome in outcomes:
        rows = [connect for connect in peer.connects if connect.outcome == outcome]
        where = f"{peer.host}:{', '.join(str(row.port) for row in rows)}"
        if outcome == "silent":
            or_down = "" if "connected" in outcomes else ", or the host is down"
            yield error(
                check,
                f"{where}: {rows[0].text}",
                _NO_ANSWER.format(or_down=or_down),
                f"nc -vz {peer.host} {rows[0].port}  # open the ports between the hosts of the job",
            )
        elif outcome == "refused":
            yield warning(
                check,
                f"{where} refuses the connection: the host is up, but nothing listens",
                "`fleetrun doctor` does not run there at the same time, or a firewall rejects",
                f"ssh {peer.host} fleetrun doctor ...  # the same command on every host, at once",
            )
        elif outcome == "another program":
            yield error(
                check,
                f"{where} is answered by something other than this check-up ({rows[0].text})",
                "the rank that is to listen there cannot",
                f"ssh {peer.host} ss -ltnp  # stop it, or another --start_port on every host",
            )
    if set(outcomes) == {"connected"}:
        count = len(peer.connects)
        yield ok(check, f"{peer.host} answers on {count} of {count} ports")


def _versions(answered: Sequence[Peer], own: HostDescription) -> Iterator[Finding]:
    is_alike = True
    for name, means, is_grave in _ALIKE:
        ours = getattr(own, name)
        theirs = {peer.host: getattr(peer.card, name) for peer in answered}
        differing = [f"{host} has {it or 'none'}" for host, it in theirs.items() if it != ours]
        if not differing:
            continue
        is_alike = False
        yield (error if is_grave else warning)(
            "versions",
            f"{name}: this host has {ours or 'none'}, {', '.join(differing)}",
            means,
            "install the same on every host  # pip freeze; nvidia-smi",
        )
    if is_alike:
        yield ok("versions", f"alike on {len(answered) + 1} hosts")
