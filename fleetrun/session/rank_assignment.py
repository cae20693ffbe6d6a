"""The ranks of hosts in a roster, the hosts that are missing, and differing settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetrun.session.config import RendezvousConfig
from fleetrun.session.messages import JoinRequest, Settings
from fleetrun.text import counted, elided

# The setting of jobs whose hosts are listed.
LIST = "the list of hosts"
# After this many failures a host is replaced if possible.
_MOST_FAILURES = 2
# The most hosts that a message names.
_NAMED = 8
# How much of a differing value is shown.
_SHOWN = 100


class Host(NamedTuple):
    """A host with a connection to the coordinator."""

    request: JoinRequest
    address: str
    is_local: bool
    joined_at: float
    heard_at: float
    # It asks for a place in the next generation.
    is_joined: bool = True
    # Its place in this generation; None: it has none. Its last place; -1: it never had one.
    place: int | None = None
    order: int = -1
    # What it has reported about this generation; empty: nothing yet.
    stage: str = ""

    @property
    def launcher(self) -> str:
        """The name of its launcher."""
        return self.request.launcher

    @property
    def entry(self) -> JoinRequest:
        """What the other hosts must know of it."""
        host = self.request.host or self.address
        return self.request._replace(host=host, settings=())

    @property
    def name(self) -> str:
        """Its name for people."""
        return self.request.named(self.address)

    @property
    def where(self) -> tuple[str, str]:
        """The name of its host, which outlives its launcher."""
        return self.address, self.request.hostname


def listed(names: Sequence[str], *, more: int = 0) -> str:
    """Return NAMES as text: the first ones, and how many others there are, with MORE.

    >>> listed(["a", "b"]), listed([str(place) for place in range(10)], more=1)
    ('a and b', '0, 1, 2, 3, 4, 5, 6, 7 and 3 more')
    """
    shown = list(names[:_NAMED])
    more += len(names) - len(shown)
    if more:
        shown.append(f"{more} more")
    if len(shown) == 1:
        return shown[0]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if shown else ""


def left_out(
    hosts: Sequence[Host], counts: Mapping[tuple[str, str], int], most: int
) -> dict[str, str]:
    """Return the launchers of HOSTS that stay out of the next generation, with reasons.

    COUNTS says how often the job has failed because of each.

    Hosts that have failed the job twice do if others wait for a place among MOST. The coordinator's
    own host never does.
    """
    excluded: dict[str, str] = {}
    candidates = [host for host in hosts if not host.is_local]
    for host in sorted(candidates, key=lambda candidate: -counts.get(candidate.where, 0)):
        count = counts.get(host.where, 0)
        if count >= _MOST_FAILURES and len(hosts) - len(excluded) > most:
            excluded[host.launcher] = f"the job has failed {count} times because of it"
    return excluded


def assigned(hosts: Sequence[Host], most: int, before: int) -> list[Host]:
    """Return at most MOST of HOSTS in the order of their ranks; BEFORE hosts had ranks before.

    A host keeps its rank; if there are fewer hosts than before, the others keep their order.
    """
    settled = sorted((host for host in hosts if host.order >= 0), key=lambda host: host.order)
    new = sorted((host for host in hosts if host.order < 0), key=_rank_of_newcomer)
    chosen = (settled + new)[:most]
    if len(chosen) < before:
        return chosen
    places: dict[int, Host] = {}
    unplaced = []
    for host in chosen:
        preferred = host.order if host.order >= 0 else host.request.rank
        if preferred is not None and preferred < len(chosen) and preferred not in places:
            places[preferred] = host
        else:
            unplaced.append(host)
    remaining = iter(unplaced)
    return [places[place] if place in places else next(remaining) for place in range(len(chosen))]


def _rank_of_newcomer(host: Host) -> tuple[bool, int, bool, tuple[int, ...], str, int]:
    rank = host.request.rank
    address = host.request.host or host.address
    return (
        rank is None,
        rank or 0,
        not host.is_local,
        _numbers(address),
        address,
        host.request.pid,
    )


def _numbers(address: str) -> tuple[int, ...]:
    """Return the sort key of an IPv4 address, so that 10.0.0.2 comes before 10.0.0.10."""
    parts = address.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def missing(config: RendezvousConfig, hosts: Sequence[Host], names: Sequence[str]) -> str:
    """Return a text that names the missing hosts, by their NAMES or ranks if those are known."""
    ranks = {host.request.rank for host in hosts}
    if names and not config.may_change:
        return listed([name for rank, name in enumerate(names) if rank not in ranks])
    # Called for each join, so names that are not shown are not made.
    here = [host.name for host in hosts[:_NAMED]]
    more = max(0, len(hosts) - _NAMED)
    joined = (
        f" ({listed(here, more=more)} {'are' if len(hosts) > 1 else 'is'} here)" if here else ""
    )
    lacking = config.least - len(hosts)
    if lacking > 0:
        absentees = counted(lacking, "host")
        if hosts and None not in ranks:
            absent = [f"rank {rank}" for rank in range(config.least) if rank not in ranks]
            absentees = listed(absent[:lacking])
        return f"{absentees} of {config.least}{joined}"
    if len(hosts) < config.most:
        return f"up to {counted(config.most - len(hosts), 'more host')}{joined}"
    return f"the ranks of lost hosts, which may still run{joined}"


def differences(first: Settings, second: Settings, where: str) -> list[str]:
    """Return sentences about the settings in which two hosts differ, with both values.

    WHERE is the host of FIRST.
    """
    known, other = dict(first), dict(second)
    return [
        f"{name} is {elided(other.get(name, ''), _SHOWN) or 'none'} there and "
        f"{elided(known.get(name, ''), _SHOWN) or 'none'} on {where}"
        for name in dict.fromkeys((*known, *other))
        if known.get(name) != other.get(name)
        # Bounds are part of the config, which the coordinator sets.
        and not (name == "--nnodes" and ":" in known.get(name, "") + other.get(name, ""))
    ]
