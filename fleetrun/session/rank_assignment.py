"""The ranks of hosts in a roster, the hosts that are missing, and differing settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetrun.session.config import RendezvousConfig
from fleetrun.session.messages import JoinRequest
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

    launcher: str
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
    # How often the job has failed because of it.
    failure_count: int = 0

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


def left_out(hosts: Sequence[Host], least: int, most: int) -> dict[str, str]:
    """Return the launchers of HOSTS that stay out of the next generation, with reasons.

    Unhealthy hosts do if LEAST others remain; hosts that have failed the job twice only if others
    wait for a place among MOST. The coordinator's own host never does.
    """
    excluded: dict[str, str] = {}
    candidates = [host for host in hosts if not host.is_local]
    for host in candidates:
        if host.request.trouble and len(hosts) - len(excluded) > least:
            excluded[host.launcher] = host.request.trouble
    for host in sorted(candidates, key=lambda candidate: -candidate.failure_count):
        if host.failure_count >= _MOST_FAILURES and len(hosts) - len(excluded) > most:
            excluded.setdefault(
                host.launcher, f"the job has failed {host.failure_count} times because of it"
            )
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


def missing(config: RendezvousConfig, hosts: Sequence[Host]) -> str:
    """Return a text that names the missing hosts."""
    if config.names and not config.may_change:
        taken = {host.request.rank for host in hosts}
        absent = [name for place, name in enumerate(config.names) if place not in taken]
        return listed(absent)
    lacking = config.least - len(hosts)
    if lacking <= 0:
        more = config.most - len(hosts)
        if more <= 0:
            return f"the ranks of lost hosts, which may still run ({_here(hosts)})"
        return f"up to {counted(more, 'more host')} ({_here(hosts)})"
    if hosts and all(host.request.rank is not None for host in hosts):
        known = {host.request.rank for host in hosts}
        absent = [f"rank {rank}" for rank in range(config.least) if rank not in known]
        absentees = listed(absent[:lacking])
    else:
        absentees = counted(lacking, "host")
    if not hosts:
        return f"{absentees} of {config.least}"
    return f"{absentees} of {config.least} ({_here(hosts)})"


def _here(hosts: Sequence[Host]) -> str:
    # Called for each join, so names that are not shown are not made.
    names = listed([host.name for host in hosts[:_NAMED]], more=max(0, len(hosts) - _NAMED))
    return f"{names} {'are' if len(hosts) > 1 else 'is'} here"


def differences(first: JoinRequest, second: JoinRequest, *, where: str) -> list[str]:
    """Return sentences about the settings in which two hosts differ, with both values.

    WHERE is the host of FIRST.
    """
    return _differences(dict(first.settings), dict(second.settings), where)


def remarks(first: JoinRequest, second: JoinRequest, *, where: str) -> list[str]:
    """Return sentences about the remarks in which two hosts differ."""
    return _differences(dict(first.remarks), dict(second.remarks), where)


def _differences(first: Mapping[str, str], second: Mapping[str, str], where: str) -> list[str]:
    differing = []
    for name in dict.fromkeys((*first, *second)):
        value, other_value = first.get(name, ""), second.get(name, "")
        # Bounds are part of the config, which the coordinator sets.
        is_settled = name == "--nnodes" and ":" in value + other_value
        if first.get(name) == second.get(name) or is_settled:
            continue
        if name == LIST and sorted(value.split(",")) == sorted(other_value.split(",")):
            differing.append(f"{name} has another order there than on {where}")
            continue
        shown = (elided(text, _SHOWN) or "none" for text in (other_value, value))
        differing.append("{} is {} there and {} on {}".format(name, *shown, where))
    return differing
