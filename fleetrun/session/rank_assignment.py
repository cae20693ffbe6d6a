"""The ranks of hosts in a roster, and which hosts are missing, stay out or differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetrun.session.messages import JoinRequest, RendezvousConfig
from fleetrun.text import counted

# After this many failures a host is replaced if possible.
_MOST_FAILURES = 2
# The most hosts that a message names, and how much of a differing value is shown.
_NAMED, _SHOWN = 8, 100


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


def listed(names: Sequence[str]) -> str:
    """Return NAMES as text: the first ones, and how many others there are.

    >>> listed(["a", "b"]), listed([str(place) for place in range(10)])
    ('a and b', '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    more = len(names) - _NAMED
    shown = [*names[:_NAMED], *([f"{more} more"] if more > 0 else [])]
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


def is_failing(host: Host, counts: Mapping[tuple[str, str], int]) -> bool:
    """Whether the job has failed because of HOST too often, by COUNTS."""
    return counts.get(host.where, 0) >= _MOST_FAILURES and not host.is_local


def dismissed(
    hosts: Mapping[int, Host], counts: Mapping[tuple[str, str], int], most: int
) -> list[int]:
    """Return the links of failing HOSTS that stay out, as others wait for a place among MOST."""
    failing = [link for link, host in hosts.items() if is_failing(host, counts)]
    failing.sort(key=lambda link: -counts[hosts[link].where])
    return failing[: max(0, len(hosts) - most)]


def assigned(hosts: Mapping[int, Host], most: int) -> list[int]:
    """Return the links of at most MOST of HOSTS in the order of their ranks.

    A host keeps its rank; if there are fewer hosts than before, they keep their order.
    """
    chosen = sorted(hosts, key=lambda link: _precedence(hosts[link]))[:most]
    if len(chosen) <= max((host.order for host in hosts.values()), default=-1):
        return chosen
    places: dict[int, int] = {}
    for link in chosen:
        order, rank = hosts[link].order, hosts[link].request.rank
        wanted = order if order >= 0 else rank
        if wanted is not None and wanted < len(chosen):
            places.setdefault(wanted, link)
    unplaced = iter([link for link in chosen if link not in places.values()])
    return [places[place] if place in places else next(unplaced) for place in range(len(chosen))]


def _precedence(host: Host) -> tuple[object, ...]:
    """Return the sort key of HOST: 10.0.0.2 comes before 10.0.0.10."""
    rank, address = host.request.rank, host.entry.host
    if host.order >= 0:
        return (0, host.order)
    numbers = [(len(part), part) for part in address.split(".")]
    return (1, rank is None, rank or 0, not host.is_local, numbers, host.request.pid)


def missing(config: RendezvousConfig, hosts: Sequence[Host], names: Sequence[str]) -> str:
    """Return a text that names the missing hosts, by their NAMES if those are known."""
    if names and not config.may_change:
        ranks = {host.request.rank for host in hosts}
        return listed([name for rank, name in enumerate(names) if rank not in ranks])
    here = listed([host.name for host in hosts])
    joined = f" ({here} {'are' if len(hosts) > 1 else 'is'} here)" if here else ""
    if len(hosts) < config.least:
        return f"{counted(config.least - len(hosts), 'host')} of {config.least}{joined}"
    return f"more hosts, or the ranks of lost ones, which may still run{joined}"


def difference(local: Host, host: Host) -> str:
    """Return in which settings HOST differs from the coordinator's LOCAL one, with both values."""
    ours, theirs = dict(local.request.settings), dict(host.request.settings)
    return "; ".join(
        f"{name} differs from that of {local.request.hostname}: "
        f"{theirs.get(name, '')[:_SHOWN] or 'none'}, not {ours.get(name, '')[:_SHOWN] or 'none'}"
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    )
