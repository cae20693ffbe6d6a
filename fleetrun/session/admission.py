"""Admission to a session: which launchers may join, and why others are refused."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fleetrun.session import seating
from fleetrun.session.messages import PROTOCOL, Join, Refused
from fleetrun.session.state import ENDED, FORMING, Close, Refusal, Send

if TYPE_CHECKING:
    from fleetrun.session.messages import Offer
    from fleetrun.session.seating import Host
    from fleetrun.session.state import Received, State, Step

# The setting that tells which script a launcher runs.
SCRIPT = "the script's digest"
# Misconfigured hosts retry: the most refusals that are remembered, in all and for each address.
_REMEMBERED, _EACH = 16, 3
# What all of them say fits into one failure's text, which every member takes.
_LONGEST_REFUSAL = 700


def is_stale(state: State, join: Join) -> bool:
    """Whether a launcher has a place in another job of this name, which was here before.

    Its own coordinator was lost, and its ranks may still run.
    """
    return bool(join.session) and join.session != state.session


def objection(state: State, event: Received, join: Join) -> str:
    """Return why a launcher cannot take part; nothing if it can."""
    if join.launcher in state.lost:
        return "it was silent for too long, and counts as lost"
    if state.phase == ENDED:
        return "the job has ended"
    return "; ".join(misfit(state, join)) or _no_place(state, event, join.offer)


def misfit(state: State, join: Join) -> list[str]:
    """Return the settings of a launcher that differ and must not."""
    local = next((host for host in state.hosts.values() if host.is_local), None)
    where = "the coordinator" if local is None else local.offer.hostname
    if join.protocol != PROTOCOL:
        return [f"its fleetrun speaks protocol {join.protocol}, and that of {where} {PROTOCOL}"]
    return [] if local is None else seating.differences(local.offer, join.offer, where=where)


def _no_place(state: State, event: Received, offer: Offer) -> str:
    """Return why there is no place for a launcher; nothing if there is one."""
    terms, rank = state.terms, offer.rank
    hosts = terms.most + terms.spares
    if rank is not None and rank >= hosts:
        return f"its rank is {rank}, and the job has {hosts} hosts, 0 to {hosts - 1}"
    holder = holder_of(state, rank)
    if holder is not None:
        # Two want the same place, or one was started again.
        return "" if holder.connection is None or not state.generation else _taken(holder)
    is_closed = state.phase != FORMING and not terms.may_change
    if is_closed or (not event.is_local and state.hosts.tally.connected >= hosts):
        here = [host for host in state.hosts.values() if host.connection is not None]
        return f"all hosts of the job are there: {seating.listed([host.name for host in here])}"
    return ""


def _taken(holder: Host) -> str:
    rank, name = holder.offer.rank, f"{holder.name}, pid {holder.offer.pid}"
    return f"it has the same rank as {name}: {rank}; give each host a rank of its own"


def holder_of(state: State, rank: int | None) -> Host | None:
    """Return the host that has claimed RANK in the roster that is being made."""
    if rank is None or state.phase != FORMING:
        return None
    return next((one for one in state.hosts.values() if one.offer.rank == rank), None)


def refuse(state: State, event: Received, why: str) -> Step:
    """Refuse a launcher, and remember that for the others."""
    if state.phase != ENDED:
        new = Refusal(event.address, line(event, why))
        state = state._replace(refused=_remember(state.refused, new))
    refused = Refused(why[:_LONGEST_REFUSAL])
    return state, (Send((event.connection,), refused), Close(event.connection))


def line(event: Received, why: str) -> str:
    """Return the line for the other hosts that a launcher cannot take part, and WHY."""
    join = event.message
    assert isinstance(join, Join)  # nobody else is refused
    return f"{join.offer.named(event.address)} cannot take part: {why}"[:_LONGEST_REFUSAL]


def _remember(known: tuple[Refusal, ...], new: Refusal) -> tuple[Refusal, ...]:
    """Add NEW; an address that is refused often displaces only its own lines."""
    counts = Counter(one.address for one in known)
    if new in known or counts[new.address] >= _EACH:
        return known
    if len(known) < _REMEMBERED:
        return (*known, new)
    most, _ = counts.most_common(1)[0]
    dropped = next(one for one in known if one.address == most)
    return (*(one for one in known if one is not dropped), new)


def is_of_this_job(state: State, join: Join) -> bool:
    """Whether a launcher that is refused has come with the script of the job, so is no stranger."""
    local = next((host for host in state.hosts.values() if host.is_local), None)
    if local is None or state.phase != FORMING or state.generation:
        return False
    ours, theirs = (dict(offer.settings).get(SCRIPT) for offer in (local.offer, join.offer))
    return bool(ours) and ours == theirs


def is_awaited(state: State, address: str) -> bool:
    """Whether ADDRESS is that of a listed host that is not there: nobody else can take its place.

    >>> from fleetrun.session.state import begin
    >>> from fleetrun.session.terms import Terms
    >>> listed = Terms(2, 2, names=("a", "b"), addresses=(("10.0.0.1",), ("10.0.0.2",)))
    >>> is_awaited(begin(listed, 0.0), "10.0.0.2"), is_awaited(begin(listed, 0.0), "10.0.0.3")
    (True, False)
    """
    taken = {host.offer.rank for host in state.hosts.values()}
    return state.phase == FORMING and any(
        address in addresses
        for place, addresses in enumerate(state.terms.addresses)
        if place not in taken
    )
