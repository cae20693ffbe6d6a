"""Finds in the ranks' records of collectives which rank waits for which; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fleetrun.records.flightfile import (
    ASYNCHRONOUS,
    BLOCKING,
    RAISED,
    Collective,
    CollectiveChannel,
    FlightRecord,
)

OTHER = {"send": "recv", "recv": "send"}
# Collectives whose root receives from all others.
_FROM_ALL = frozenset(("gather", "reduce"))
# In a running job, a collective that is open for longer is reported.
LATE_S = 2.0
# An asynchronous collective that a rank finds open this long after its call keeps it waiting.
_SETTLED_S = 0.5


class OpenCollective(NamedTuple):
    """A rank that is in a collective, and the ranks that have not entered it."""

    rank: int
    collective: Collective
    missing: tuple[int, ...]
    # Whether its rank waits: an asynchronous one that all have entered may be done.
    holds_up: bool = True
    # Ranks that have issued it, but after another one that their devices have not finished.
    behind: tuple[int, ...] = ()

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ranks that must go on first."""
        return self.missing or self.behind


def open_collectives(records: Mapping[int, FlightRecord], until: float) -> list[OpenCollective]:
    """Return the oldest open collective of each channel of each rank.

    Of asynchronous ones, which may be done, also the oldest that a rank has not entered.
    """
    stuck = {
        (collective.channel, collective.sequence)
        for record in records.values()
        for collective in record.collectives
        if collective.is_open and record.settled_at - collective.issued_at > _SETTLED_S
    }
    last = {rank: record.last for rank, record in records.items()}
    done = {
        (call.channel, call.sequence)
        for record in records.values()
        for call in record.collectives
        if call.done_at is not None and call.root < 0 and not call.channel.is_pair
    }
    waits = []
    for rank, record in sorted(records.items()):
        seen: set[tuple[CollectiveChannel, bool]] = set()
        for collective in record.collectives:
            channel = collective.channel
            if not collective.is_open or collective.issued_at > until or (channel, True) in seen:
                continue
            place = channel, collective.sequence
            if collective.state == ASYNCHRONOUS and place in done - stuck:
                # Its rank has not looked since.
                continue
            missing = tuple(_absent(rank, collective, last))
            if (channel, bool(missing)) not in seen:
                seen.add((channel, bool(missing)))
                holds_up = bool(missing) or collective.state == BLOCKING or place in stuck
                is_first = collective == _oldest_open(record)
                behind = tuple(_behind(rank, collective, records)) if is_first else ()
                waits.append(OpenCollective(rank, collective, missing, holds_up, behind))
    return waits


def _absent(
    rank: int, collective: Collective, last: Mapping[int, Mapping[CollectiveChannel, int]]
) -> Iterator[int]:
    """Yield the ranks whose LAST call of the same channel came before COLLECTIVE."""
    members, channel = _peers(rank, collective.channel)
    for member in members:
        if member in last and last[member].get(channel, 0) < collective.sequence:
            yield member


def _behind(
    rank: int, collective: Collective, records: Mapping[int, FlightRecord]
) -> Iterator[int]:
    """Yield the ranks that have also issued COLLECTIVE, but after one that is still open."""
    members, channel = _peers(rank, collective.channel)
    for member in members:
        record = records.get(member)
        first = None if record is None else _oldest_open(record)
        if record is None or first is None or first.state != ASYNCHRONOUS:
            continue
        if record.settled_at - first.issued_at <= _SETTLED_S:
            # It may have finished.
            continue
        later = record.collectives[record.collectives.index(first) + 1 :]
        if any((call.channel, call.sequence) == (channel, collective.sequence) for call in later):
            yield member


def _oldest_open(record: FlightRecord) -> Collective | None:
    return next((collective for collective in record.collectives if collective.is_open), None)


def _peers(rank: int, channel: CollectiveChannel) -> tuple[list[int], CollectiveChannel]:
    """Return the other ranks of CHANNEL, and the channel on which they enter."""
    if not channel.is_pair:
        return [member for member in channel.ranks if member != rank], channel
    peer = channel.target if channel.operation == "send" else channel.source
    return [peer], channel._replace(operation=OTHER[channel.operation])


def awaited_alone(waits: Sequence[OpenCollective]) -> list[int]:
    """Return the ranks that are awaited and wait for nobody, longest awaited first."""
    waiting = {wait.rank for wait in waits if wait.holds_up}
    since: dict[int, float] = {}
    for wait in waits:
        for member in wait.missing:
            if member not in waiting:
                known = since.get(member, wait.collective.issued_at)
                since[member] = min(known, wait.collective.issued_at)
    return sorted(since, key=lambda rank: (since[rank], rank))


def oldest(waits: Sequence[OpenCollective]) -> tuple[Collective, list[int]]:
    """Return the collective of WAITS that was issued first, and the ranks that wait in it."""
    first = min(waits, key=lambda wait: (wait.collective.issued_at, wait.rank)).collective
    place = first.channel, first.sequence
    return first, [
        wait.rank for wait in waits if (wait.collective.channel, wait.collective.sequence) == place
    ]


def find_cycle(waits: Sequence[OpenCollective]) -> list[OpenCollective]:
    """Return a cycle of waits, each rank missing in the one before; empty if there is none.

    >>> find_cycle([])
    []
    """
    for start in waits:
        # By rank: the wait that has led to it.
        path: dict[int, OpenCollective] = {}
        todo = [start]
        while todo:
            wait = todo.pop()
            for member in wait.awaited:
                if member in path:
                    continue
                path[member] = wait
                # The oldest first: it may hold up the others.
                todo += [follower for follower in reversed(waits) if follower.rank == member]
        if start.rank in path:
            circle = [path[start.rank]]
            while circle[-1].rank != start.rank:
                circle.append(path[circle[-1].rank])
            return circle[::-1]
    return []


def reopened(record: FlightRecord) -> FlightRecord:
    """Return RECORD as if its rank still waited in its last collective, if that has raised."""
    *earlier, final = record.collectives or (None,)
    if final is None or final.state != RAISED:
        return record
    return record._replace(collectives=(*earlier, final._replace(state=BLOCKING)))


def without_early_ends(records: Mapping[int, FlightRecord]) -> dict[int, FlightRecord]:
    """Return RECORDS, with calls open that need a rank which has not reached them.

    Paddle calls complete at once what runs in the stream of computation, as in pipelines; and what
    a device is given after such a call waits for it.
    """
    # The last call of each channel that each rank's device may have begun.
    reached = {rank: dict(record.last) for rank, record in records.items()}
    first_open: dict[int, int] = {}
    places = _stopped(records)
    while True:
        first_open |= places
        for rank, place in places.items():
            for call in reversed(records[rank].collectives[place:]):
                reached[rank][call.channel] = call.sequence - 1
        begun_by_all: dict[CollectiveChannel, int] = {}
        for last in reached.values():
            for channel in last.keys() - begun_by_all.keys():
                members = (reached[member] for member in channel.ranks if member in reached)
                begun_by_all[channel] = min(other.get(channel, 0) for other in members)
        places = {}
        for rank, record in records.items():
            for place, call in enumerate(record.collectives[: first_open.get(rank)]):
                if (
                    call.state == ASYNCHRONOUS
                    and call.done_at is not None
                    and (call.channel.is_pair or call.sequence > begun_by_all[call.channel])
                    and _is_needed(rank, call, tuple(_absent(rank, call, reached)))
                ):
                    places[rank] = place
                    break
        if not places:
            break
    return {
        **records,
        **{rank: _opened(records[rank], place) for rank, place in first_open.items()},
    }


def _stopped(records: Mapping[int, FlightRecord]) -> dict[int, int]:
    """Return by rank the place of the first call that its stream of computation cannot finish.

    Such a stream runs its calls in order: a rank whose recv comes before its send keeps that from
    its peer, though both have been issued.
    """
    places = dict.fromkeys(records, 0)
    begun = {rank: dict(record.last) for rank, record in records.items()}
    for rank, record in records.items():
        for call in reversed(record.collectives):
            begun[rank][call.channel] = call.sequence - 1
    has_changed = True
    while has_changed:
        has_changed = False
        for rank, record in records.items():
            for call in record.collectives[places[rank] :]:
                begun[rank][call.channel] = call.sequence
                if call.is_in_stream and _is_needed(rank, call, tuple(_absent(rank, call, begun))):
                    break
                places[rank] += 1
                has_changed = True
    return {rank: at for rank, at in places.items() if at < len(records[rank].collectives)}


def _opened(record: FlightRecord, first: int) -> FlightRecord:
    """Return RECORD as if its rank had just seen that nothing is done from its call FIRST on."""
    calls = (
        call._replace(done_at=None) if call.state == ASYNCHRONOUS else call
        for call in record.collectives[first:]
    )
    collectives = (*record.collectives[:first], *calls)
    return record._replace(collectives=collectives, settled_at=math.inf)


def with_polls(
    records: Mapping[int, FlightRecord], waits: Sequence[OpenCollective]
) -> dict[int, FlightRecord]:
    """Return RECORDS, with the newest call of a rank open if it has polled a store until late."""
    since = min((wait.collective.issued_at for wait in waits if wait.missing), default=math.inf)
    polling = {}
    for rank, record in records.items():
        calls = sorted(record.collectives, key=lambda call: call.issued_at)
        if calls and calls[-1].channel.is_store and calls[-1].issued_at > since + LATE_S:
            others = [call for call in record.collectives if call is not calls[-1]]
            newest = calls[-1]._replace(done_at=None)
            polling[rank] = record._replace(collectives=(*others, newest))
    return {**records, **polling}


def _is_needed(rank: int, call: Collective, absent: Sequence[int]) -> bool:
    """Whether RANK cannot complete CALL without the ranks ABSENT."""
    operation = call.operation.partition(" ")[0]
    if operation == "send":
        # A buffer may have taken it.
        return False
    if operation in _FROM_ALL:
        return rank == call.root and bool(absent)
    return call.root in absent if call.root >= 0 else bool(absent)
