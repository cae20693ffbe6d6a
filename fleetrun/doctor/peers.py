"""Findings about the other hosts of a job; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleetrun.doctor.findings import Finding, error, ok, warning
from fleetrun.session.introductions import Connect, HostDescription, Peer

# Beyond this, certificates, file times and the order of log lines become unreliable.
CLOCK_S = 1.0
# What must be equal, the consequence if not, and whether that ends the job.
_ALIKE = (
    ("fleetrun", "hosts may plan the job differently", True),
    ("paddle", "ranks may hang at the first allreduce, or differ in their results", True),
    ("nccl", "NCCL refuses to connect different versions", True),
    ("cuda", "kernels and results may differ", False),
    ("python", "one host may be unable to unpickle what another sends", False),
    ("driver", "one host may lack what the others can do", False),
)


def judge(peers: Sequence[Peer], own: HostDescription) -> Iterator[Finding]:
    """Yield the findings about PEERS and OWN."""
    for peer in peers:
        yield from _connections(peer)
    answered = [peer for peer in peers if peer.card is not None]
    for peer in answered:
        yield from _clock(peer)
    if answered:
        yield from _versions(answered, own)


def _connections(peer: Peer) -> Iterator[Finding]:
    check = "connection"
    outcomes: dict[str, list[Connect]] = {}
    for connect in peer.connects:
        outcomes.setdefault(connect.outcome, []).append(connect)
    connected = outcomes.get("connected", [])
    for outcome, rows in outcomes.items():
        ports = ", ".join(str(row.port) for row in rows)
        where = f"{peer.host}:{ports}"
        if outcome == "silent":
            yield error(
                check,
                f"{where}: {rows[0].text}",
                "a firewall drops the packets, or the host is down; ranks would wait forever"
                if not connected
                else "a firewall drops the packets; ranks would wait forever",
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
    if len(connected) == len(peer.connects):
        yield ok(check, f"{peer.host} answers on {len(connected)} of {len(connected)} ports")


def _clock(peer: Peer) -> Iterator[Finding]:
    off = abs(peer.ahead_s)
    if off - peer.accuracy_s > CLOCK_S:
        side = "ahead of" if peer.ahead_s > 0 else "behind"
        yield warning(
            "clock",
            f"that of {peer.host} is {off:.1f} s {side} ours",
            "times in the logs of the hosts contradict each other, and certificates may not hold",
            f"ssh {peer.host} chronyc makestep  # and here; or timedatectl set-ntp true",
        )
    else:
        yield ok("clock", f"that of {peer.host} is synchronised with ours")


def _versions(answered: Sequence[Peer], own: HostDescription) -> Iterator[Finding]:
    is_alike = True
    for name, means, is_grave in _ALIKE:
        our_value = getattr(own, name)
        differing = {
            peer.host: getattr(peer.card, name)
            for peer in answered
            if getattr(peer.card, name) != our_value
        }
        if not differing:
            continue
        is_alike = False
        shown = ", ".join(
            f"{host} has {their_value or 'none'}" for host, their_value in differing.items()
        )
        level = error if is_grave else warning
        yield level(
            "versions",
            f"{name}: this host has {our_value or 'none'}, {shown}",
            means,
            "install the same on every host  # pip freeze; nvidia-smi",
        )
    if is_alike:
        yield ok("versions", f"alike on {len(answered) + 1} hosts")
