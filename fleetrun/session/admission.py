"""Admission to a session: which launchers may join, and why others are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from fleetrun.rundir.variables import TOKEN
from fleetrun.session import rank_assignment
from fleetrun.session.messages import PROTOCOL, Join, JoinRequest, Refused
from fleetrun.session.rank_assignment import Host
from fleetrun.session.state import ENDED, FORMING, Close, Received, Refusal, Send, State, Step

# The setting by which scripts are compared, and what people call it.
DIGEST, SCRIPT = "the script's digest", "the script"
# Misconfigured hosts retry: keep at most this many refusals, in all and per address.
_REMEMBERED, _EACH = 16, 3
# All remarks together must fit into the text of one failure.
_LONGEST_REFUSAL = 700


class Objection(NamedTuple):
    """Why a launcher cannot take part: for the job's own hosts, and for the launcher itself."""

    why: str
    # What the launcher itself is told; empty: the same.
    told: str = ""


OVER = Objection("the job has ended")
_STALE = Objection("it belongs to another job of this name, whose coordinator was lost")
_LOST = Objection("it was silent for too long and is considered lost")
_STRANGER = Objection(
    f"the job has begun, and without {TOKEN} no other host can join it: set the same on every host"
)


def _is_stranger(state: State, event: Received, join: Join) -> bool:
    """Whether a launcher joins a job that has begun without anything that proves who it is."""
    if state.has_token or event.is_local or not _has_begun(state):
        return False
    listed = any(event.address in addresses for addresses in state.config.addresses)
    return not listed and join.launcher not in {*state.hosts, *state.lost}


def _has_begun(state: State) -> bool:
    """Whether there has been a roster."""
    return state.generation > 0 or state.roster is not None


def doubt(state: State, event: Received, join: Join) -> Objection | None:
    """Return why a launcher does not count as one of this job; None if it does."""
    if _is_stranger(state, event, join):
        return _STRANGER
    if join.session and join.session != state.session:
        # Its own coordinator was lost; its ranks may still be running.
        return _STALE
    return _LOST if join.launcher in state.lost else None


def objection(state: State, event: Received, join: Join) -> Objection | None:
    """Return why a launcher of this job cannot take part; None if it can."""
    if state.phase == ENDED and not _has_begun(state):
        # The coordinator's own host may lack the script, and have ended the job because of it.
        return OVER
    difference = unlike(state, join)
    if difference is not None:
        return difference
    return OVER if state.phase == ENDED else _no_place(state, event, join.request)


def unlike(state: State, join: Join) -> Objection | None:
    """Return how a launcher differs where all hosts must agree; None if it does not."""
    misfits = misfit(state, join)
    if not misfits:
        return None
    summary = (
        f"{rank_assignment.listed(list(misfits))} {'differs' if len(misfits) == 1 else 'differ'}"
    )
    summary += " from the job's: see the console of the coordinator"
    return _for_hosts(state, "; ".join(misfits.values()), summary)


def misfit(state: State, join: Join) -> dict[str, str]:
    """Return the settings in which a launcher must not differ but does, each with a sentence."""
    local = next((host for host in state.hosts.values() if host.is_local), None)
    where = "the coordinator" if local is None else local.request.hostname
    if join.protocol != PROTOCOL:
        version = "the version of fleetrun"
        line = f"its fleetrun speaks protocol {join.protocol}, and that of {where} {PROTOCOL}"
        return {version: line}
    differing = (
        {}
        if local is None
        else rank_assignment.differences(local.request, join.request, where=where)
    )
    if differing.pop(DIGEST, None) is not None:
        differing = {SCRIPT: f"its script differs from that on {where}", **differing}
    return differing


def _no_place(state: State, event: Received, request: JoinRequest) -> Objection | None:
    """Return why there is no place for a launcher; None if there is one."""
    config, rank = state.config, request.rank
    hosts = config.most + config.spares
    if rank is not None and rank >= hosts:
        return Objection(f"its rank is {rank}, and the job has {hosts} hosts, 0 to {hosts - 1}")
    holder = holder_of(state, rank)
    if holder is not None:
        # Two hosts claim the same rank, or one was started again.
        if holder.connection is None or not state.generation:
            return None
        other = f"{holder.name}, pid {holder.request.pid}"
        return _for_hosts(
            state, f"it has the same rank as {other}: {rank}", f"rank {rank} is taken"
        )
    is_closed = state.phase != FORMING and not config.may_change
    present = [host for host in state.hosts.values() if host.connection is not None]
    if is_closed or (not event.is_local and len(present) >= hosts):
        full = "all hosts of the job are there"
        names = rank_assignment.listed([host.name for host in present])
        return _for_hosts(state, f"{full}: {names}", full)
    return None


def _for_hosts(state: State, why: str, told: str) -> Objection:
    """Return an objection whose details only launchers that know the token learn."""
    return Objection(why, "" if state.has_token else told)


def holder_of(state: State, rank: int | None) -> Host | None:
    """Return the host that has claimed RANK while the roster is being formed."""
    if rank is None or state.phase != FORMING:
        return None
    return next((host for host in state.hosts.values() if host.request.rank == rank), None)


def refuse(state: State, event: Received, objection: Objection, *, ends_job: bool = False) -> Step:
    """Refuse a launcher, and keep a remark for the other hosts."""
    if state.phase != ENDED:
        new = Refusal(event.address, line(event, objection.why))
        state = state._replace(refused=_remember(state.refused, new))
    refused = Refused((objection.told or objection.why)[:_LONGEST_REFUSAL], ends_job)
    return state, (Send((event.connection,), refused), Close(event.connection))


def line(event: Received, why: str) -> str:
    """Return the remark for the other hosts that a launcher cannot take part, and WHY."""
    join = event.message
    assert isinstance(join, Join)  # nobody else is refused
    return f"{join.request.named(event.address)} cannot take part: {why}"[:_LONGEST_REFUSAL]


def _remember(known: tuple[Refusal, ...], new: Refusal) -> tuple[Refusal, ...]:
    """Add NEW; an address that is often refused displaces only its own entries."""
    counts = Counter(refusal.address for refusal in known)
    if new in known or counts[new.address] >= _EACH:
        return known
    if len(known) < _REMEMBERED:
        return (*known, new)
    most, _ = counts.most_common(1)[0]
    dropped = next(refusal for refusal in known if refusal.address == most)
    return (*(refusal for refusal in known if refusal is not dropped), new)


def is_of_this_job(state: State, join: Join, misfits: Collection[str]) -> bool:
    """Whether a launcher with these MISFITS has the script of the job, so that it belongs to it."""
    if DIGEST not in dict(join.request.settings):
        return False
    is_first = state.phase == FORMING and not state.generation
    has_local = any(host.is_local for host in state.hosts.values())
    return is_first and has_local and SCRIPT not in misfits


def is_awaited(state: State, address: str) -> bool:
    """Whether ADDRESS is that of a listed host which has not joined yet.

    >>> from fleetrun.session.state import begin
    >>> from fleetrun.session.config import RendezvousConfig
    >>> listed = RendezvousConfig(2, 2, names=("a", "b"), addresses=(("10.0.0.1",), ("10.0.0.2",)))
    >>> is_awaited(begin(listed, 0.0), "10.0.0.2"), is_awaited(begin(listed, 0.0), "10.0.0.3")
    (True, False)
    """
    taken = {host.request.rank for host in state.hosts.values()}
    return state.phase == FORMING and any(
        address in addresses
        for place, addresses in enumerate(state.config.addresses)
        if place not in taken
    )
