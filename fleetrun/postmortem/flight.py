"""Finds the ranks that keep others waiting, from the ranks' records of collectives; pure.

A rank in a collective that another rank has not entered waits for that rank. The cause is a rank
that has called something else than the others at the same place of a group; else one that is
awaited and waits for nobody; else a circle of ranks that wait for each other; else, if all have
entered, the network or a device.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fleetrun.rundir.flightfile import (
    ASYNCHRONOUS,
    BLOCKING,
    RAISED,
    Collective,
    CollectiveChannel,
    FlightRecord,
)
from fleetrun.rundir.rankfile import RankAxes
from fleetrun.text import format_ranges

DESYNC, MISSING, CYCLE, UNFINISHED = "desync", "missing", "cycle", "unfinished"
_WAY = {"send": "to", "recv": "from"}
_OTHER = {"send": "recv", "recv": "send"}
# Collectives in which all ranks must have tensors of one size.
_SAME_SIZE = frozenset(
    ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "scatter", "gather")
) | {"backward"}
# In a running job, a collective that is open for longer is reported.
LATE_S = 2.0
# An asynchronous collective that a rank finds open this long after its call keeps it waiting.
_SETTLED_S = 0.5
# The most ranks of which each gets a sentence.
_MOST_NAMED = 4


class FlightFinding(NamedTuple):
    """A finding, a sentence without its end: RANKS are the cause; none if no rank is."""

    kind: str
    ranks: tuple[int, ...]
    text: str


class RankState(NamedTuple):
    """What is known about a rank besides its record."""

    # Where its main thread stands; empty: not known.
    place: str = ""
    has_ended: bool = False


class JobRanks(NamedTuple):
    """The ranks of a job, for names."""

    ranks: int
    axes: RankAxes | None = None
    states: Mapping[int, RankState] = {}

    def state(self, rank: int) -> RankState:
        """Return what is known about RANK."""
        return self.states.get(rank, RankState())


class Wait(NamedTuple):
    """A rank that is in a collective, and the ranks that have not entered it."""

    rank: int
    call: Collective
    missing: tuple[int, ...]
    # Whether its rank waits: an asynchronous one that all have entered may be done.
    holds_up: bool = True
    # Ranks that have issued it, but after another one that their devices have not finished.
    behind: tuple[int, ...] = ()


def verdict(
    records: Mapping[int, FlightRecord],
    job: JobRanks,
    *,
    has_failed: bool = False,
    until: float = math.inf,
) -> tuple[FlightFinding, ...]:
    """Return why the ranks of RECORDS hang; empty if the records do not tell.

    HAS_FAILED: the job ended, and a rank that raised in a collective counts as waiting there.
    Collectives issued after UNTIL may still be in progress.
    """
    known = {rank: record for rank, record in records.items() if not record.has_failed}
    differing = desyncs(known, job)
    if differing:
        return differing
    if has_failed:
        known = {rank: _reopened(record) for rank, record in known.items()}
    waits = _waits(known, until)
    awaited = _awaited_alone(waits)
    if awaited:
        return tuple(_describe_missing(rank, waits, job) for rank in awaited[:_MOST_NAMED])
    cycle = _find_cycle(waits)
    if cycle:
        return (_describe_cycle(cycle, job),)
    return _unfinished(waits, known, job)


def desyncs(
    records: Mapping[int, FlightRecord], job: JobRanks, *, is_early: bool = False
) -> tuple[FlightFinding, ...]:
    """Return where ranks first called different collectives at the same place of a group.

    A send and its recv are compared by size, if they are not done. IS_EARLY: a tie is left out
    while ranks of its group may still show who is right.
    """
    places: dict[tuple[CollectiveChannel, int], dict[int, Collective]] = {}
    for rank, record in records.items():
        for call in () if record.has_failed else record.collectives:
            channel = call.channel
            if channel.is_pair:
                channel = channel._replace(operation="")
            places.setdefault((channel, call.sequence), {})[rank] = call
    first: dict[CollectiveChannel, tuple[float, dict[int, Collective]]] = {}
    for (channel, _), calls in places.items():
        counts = Counter(map(_signature, calls.values()))
        is_tied = len(calls) < len(channel.ranks) and not _has_majority(counts)
        is_arriving = is_early and is_tied and not channel.is_pair
        is_done = channel.is_pair and not any(call.is_open for call in calls.values())
        at = min(call.issued_at for call in calls.values())
        if len(counts) > 1 and not is_arriving and not is_done:
            first[channel] = min(first.get(channel, (at, calls)), (at, calls), key=lambda x: x[0])
    ordered = sorted(first.values(), key=lambda item: item[0])
    return tuple(_describe_desync(calls, job) for _, calls in ordered)


# Who waits for whom -------------------------------------------------------------------------------

_OpenCall = tuple[Collective, tuple[int, ...]]


def _opened(
    record: FlightRecord, last: Mapping[int, Mapping[CollectiveChannel, int]]
) -> tuple[list[_OpenCall], float]:
    """Return the calls of RECORD that may be open, with who is missing, and when that was seen.

    LAST has the newest call of each rank and channel. Paddle calls complete at once what runs in
    the stream of computation. It is open from the first call on that needs a rank which has not
    entered it: a device runs its calls in order.
    """
    calls = []
    seen_at = record.settled_at
    for call in record.collectives:
        members, channel = _peers(record.rank, call.channel)
        absent = [m for m in members if m in last and last[m].get(channel, 0) < call.sequence]
        if call.state == ASYNCHRONOUS and call.done_at is not None:
            if _is_needed(record.rank, call, absent):
                seen_at = math.inf
            if seen_at < math.inf:
                continue
        elif not call.is_open:
            continue
        calls.append((call, tuple(absent)))
    return calls, seen_at


def _waits(records: Mapping[int, FlightRecord], until: float) -> list[Wait]:
    """Return the oldest open collective of each channel of each rank.

    Of asynchronous ones, which may be done, also the oldest that a rank has not entered.
    """
    last = {rank: record.last for rank, record in records.items()}
    opened: dict[int, list[_OpenCall]] = {}
    # Places that were seen open some time after they were issued.
    stuck: dict[int, set[tuple[CollectiveChannel, int]]] = {}
    done = set()
    for rank, record in sorted(records.items()):
        opened[rank], seen_at = _opened(record, last)
        calls = [call for call, _ in opened[rank]]
        stuck[rank] = {place(call) for call in calls if seen_at - call.issued_at > _SETTLED_S}
        done |= {
            place(call)
            for call in {*record.collectives} - {*calls}
            if call.done_at is not None and call.root < 0 and not call.channel.is_pair
        }
    all_stuck = set().union(*stuck.values())
    waits = []
    for rank, own in opened.items():
        seen: set[tuple[CollectiveChannel, bool]] = set()
        for at, (call, missing) in enumerate(own):
            # Of one that is done elsewhere, its rank has not looked since.
            is_done = call.state == ASYNCHRONOUS and place(call) in done - all_stuck
            kinds = {(call.channel, bool(missing)), (call.channel, True)}
            if is_done or call.issued_at > until or kinds & seen:
                continue
            seen.add((call.channel, bool(missing)))
            holds_up = bool(missing) or call.state == BLOCKING or place(call) in all_stuck
            behind = () if at else tuple(_behind(rank, call, opened, stuck))
            waits.append(Wait(rank, call, missing, holds_up, behind))
    return waits


def place(call: Collective) -> tuple[CollectiveChannel, int]:
    """Return what the ranks of a group share of a collective."""
    return call.channel, call.sequence


def _is_needed(rank: int, call: Collective, absent: Sequence[int]) -> bool:
    """Whether RANK cannot complete CALL without one of the ABSENT, which have not entered it."""
    operation = call.operation.partition(" ")[0]
    if operation == "send":
        # A buffer may have taken it.
        return False
    if operation in {"gather", "reduce"}:
        # Its root receives from all others.
        return rank == call.root and bool(absent)
    return call.root in absent if call.root >= 0 else bool(absent)


def _behind(
    rank: int,
    call: Collective,
    opened: Mapping[int, list[_OpenCall]],
    stuck: Mapping[int, set[tuple[CollectiveChannel, int]]],
) -> Iterator[int]:
    """Yield the ranks that have also issued CALL, but after one that is still open on a device."""
    members, channel = _peers(rank, call.channel)
    for member in members:
        calls = [other for other, _ in opened.get(member, ())]
        is_stuck = bool(calls) and place(calls[0]) in stuck[member]
        is_later = (channel, call.sequence) in map(place, calls[1:])
        if is_stuck and is_later and calls[0].state == ASYNCHRONOUS:
            yield member


def _peers(rank: int, channel: CollectiveChannel) -> tuple[list[int], CollectiveChannel]:
    """Return the other ranks of CHANNEL, and the channel on which they enter."""
    if not channel.is_pair:
        return [member for member in channel.ranks if member != rank], channel
    peer = channel.target if channel.operation == "send" else channel.source
    return [peer], channel._replace(operation=_OTHER[channel.operation])


def _reopened(record: FlightRecord) -> FlightRecord:
    """Return RECORD as if its rank still waited in its last collective, if that has raised."""
    *earlier, final = record.collectives or (None,)
    if final is None or final.state != RAISED:
        return record
    return record._replace(collectives=(*earlier, final._replace(state=BLOCKING)))


def _awaited_alone(waits: Sequence[Wait]) -> list[int]:
    """Return the ranks that are awaited and wait for nobody, longest awaited first."""
    blocked = {wait.rank for wait in waits if wait.holds_up}
    since: dict[int, float] = {}
    for wait in waits:
        for member in set(wait.missing) - blocked:
            since[member] = min(since.get(member, math.inf), wait.call.issued_at)
    return sorted(since, key=lambda rank: (since[rank], rank))


def _find_cycle(waits: Sequence[Wait]) -> list[Wait]:
    """Return a cycle of waits, each rank awaited in the one before; empty if there is none."""
    for start in waits:
        # By rank: the wait that has led to it.
        path: dict[int, Wait] = {}
        todo = [start]
        while todo:
            wait = todo.pop()
            for member in wait.missing or wait.behind:
                if member not in path:
                    path[member] = wait
                    # The oldest first: it may hold up the others.
                    todo += [other for other in reversed(waits) if other.rank == member]
        if start.rank in path:
            circle = [path[start.rank]]
            while circle[-1].rank != start.rank:
                circle.append(path[circle[-1].rank])
            return circle[::-1]
    return []


# Sentences ----------------------------------------------------------------------------------------


def _signature(call: Collective) -> tuple[object, ...]:
    """Return what must be equal on all ranks."""
    if call.channel.is_pair:
        return (call.nbytes,)
    size = math.prod(call.shape) if call.operation.partition(" ")[0] in _SAME_SIZE else 0
    return call.operation, call.dtype, call.root, size


def _has_majority(counts: Counter[tuple[object, ...]]) -> bool:
    """Whether more ranks made one call than any other."""
    most = [number for _, number in counts.most_common(2)]
    return len(most) == 1 or most[0] > most[1]


def _describe_desync(calls: Mapping[int, Collective], job: JobRanks) -> FlightFinding:
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(calls):
        groups.setdefault(_signature(calls[rank]), []).append(rank)
    # The most last.
    *fewer, most = sorted(groups.values(), key=lambda ranks: (len(ranks), ranks))
    called = []
    for ranks in (*fewer, most):
        call = calls[ranks[0]]
        root = f" (root {call.root})" if call.root >= 0 else ""
        tensor = f" of {call.tensor}" if call.tensor else ""
        what = f"{call.operation}{tensor}{root}{_at_site(call)}"
        called.append(f"{who(ranks, job)} called {what}")
    call = calls[most[0]]
    kind = "message" if call.channel.is_pair else "collective"
    where = f"{kind} {call.sequence} {of(call.channel, job)}"
    text = f"{', '.join(called[:-1])} where {called[-1]}: {where}"
    is_majority = _has_majority(Counter(map(_signature, calls.values())))
    odd = {rank for ranks in fewer for rank in ranks} if is_majority else calls
    return FlightFinding(DESYNC, tuple(sorted(odd)), text)


def _describe_missing(rank: int, waits: Sequence[Wait], job: JobRanks) -> FlightFinding:
    """Describe the collective that RANK never entered, and the ranks that wait there."""
    first, waiting_ranks = _oldest([wait for wait in waits if rank in wait.missing])
    channel = first.channel
    if channel.is_pair:
        opposite = _OTHER[channel.operation]
        action = f"made {opposite} {first.sequence} {_WAY[opposite]} {who(waiting_ranks[:1], job)}"
        waiter = f", which waits in {channel.operation}{_at_site(first)} since {_since(first)}"
    else:
        action = f"entered {named(first, job)}"
        others = f"{len(waiting_ranks)} others wait"
        if len(waiting_ranks) == 1:
            others = f"{who(waiting_ranks, job)} waits"
        waiter = f"; {others} there{_at_site(first)} since {_since(first)}"
    text = f"{who([rank], job)} never {action}{waiter}"
    # The one that waits would be meant.
    it = "it" if len(waiting_ranks) > 1 else f"rank {rank}"
    state = job.state(rank)
    if state.has_ended:
        text = f"{text}; {it} has ended"
    elif state.place:
        text = f"{text}; {it} stands in {state.place}"
    return FlightFinding(MISSING, (rank,), text)


def _describe_cycle(cycle: Sequence[Wait], job: JobRanks) -> FlightFinding:
    """Describe the ranks of CYCLE, which wait for each other."""
    ranks = [wait.rank for wait in cycle]
    parts = []
    for wait, awaited in zip(cycle, [*ranks[1:], ranks[0]], strict=True):
        call, way = wait.call, _WAY.get(wait.call.channel.operation)
        where = (
            f"{call.operation} {call.sequence} {way} rank {awaited}" if way else named(call, job)
        )
        parts.append(f"{who([wait.rank], job)} in {where}{_at_site(call)}")
    circle = " → ".join(map(str, (*ranks, ranks[0])))
    text = f"ranks wait for each other in a circle, {circle}: {'; '.join(parts)}"
    if all((wait.call.operation, wait.call.state) == ("send", BLOCKING) for wait in cycle):
        text += "; there, a send waits for its recv, so some of them must receive first"
    return FlightFinding(CYCLE, tuple(sorted(set(ranks))), text)


def _unfinished(
    waits: Sequence[Wait], records: Mapping[int, FlightRecord], job: JobRanks
) -> tuple[FlightFinding, ...]:
    """Describe the oldest collective that all have entered and none finishes."""
    entered = [
        wait
        for wait in waits
        if not wait.missing
        and records.keys() >= {wait.rank, *_peers(wait.rank, wait.call.channel)[0]}
    ]
    if not entered:
        return ()
    first, ranks = _oldest([wait for wait in entered if wait.holds_up] or entered)
    waiting_there = f"wait{'s' * (len(ranks) == 1)} there{_at_site(first)} since {_since(first)}"
    if all(job.state(rank).has_ended for rank in ranks):
        waiting_there = "ended before it was done"
    text = f"all its ranks have entered {named(first, job)}, and {who(ranks, job)} {waiting_there}"
    differ = ", or the collectives of this backward differ" * (first.operation == "backward")
    reason = f"no rank is missing, so the network or a device holds it up{differ}"
    return (FlightFinding(UNFINISHED, (), f"{text}: {reason}"),)


def _oldest(waits: Sequence[Wait]) -> tuple[Collective, list[int]]:
    """Return the collective of WAITS that was issued first, and the ranks that wait in it."""
    first = min(waits, key=lambda wait: (wait.call.issued_at, wait.rank)).call
    return first, [wait.rank for wait in waits if place(wait.call) == place(first)]


def named(call: Collective, job: JobRanks) -> str:
    """Name CALL by its number in its group."""
    return f"{call.operation} {call.sequence} {of(call.channel, job)}"


def of(channel: CollectiveChannel, job: JobRanks) -> str:
    """Name the group of CHANNEL: `of mp [8-15]`, `of all ranks`.

    >>> of(CollectiveChannel((0, 1)), JobRanks(2)), of(CollectiveChannel((0, 2), 3), JobRanks(4))
    ('of all ranks', 'of ranks 0, 2 (their group 3)')
    >>> of(CollectiveChannel((2, 3), 2), JobRanks(4, RankAxes((("dp", 2), ("mp", 2)))))
    'of mp [2-3] (their group 2)'
    """
    if channel.is_pair:
        return f"from rank {channel.source} to rank {channel.target}"
    number = f" (their group {channel.number})" if channel.number > 1 else ""
    if len(channel.ranks) == job.ranks:
        return f"of all ranks{number}"
    axis = job.axes.axis_of(channel.ranks) if job.axes is not None else ""
    numbers = format_ranges(channel.ranks)
    return f"of {axis} [{numbers}]{number}" if axis else f"of ranks {numbers}{number}"


def who(ranks: Sequence[int], job: JobRanks) -> str:
    """Name RANKS; a single one with its place on the axes."""
    place = job.axes.place(ranks[0]) if job.axes is not None and len(ranks) == 1 else ""
    where = f" ({place})" if place else ""
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}{where}"


def _at_site(call: Collective) -> str:
    """Return the line of the script that has made CALL, if that is known."""
    return f" in {call.site[0].rpartition('/')[2]}:{call.site[1]}" if call.site else ""


def _since(call: Collective) -> str:
    """Return the time of day at which CALL was issued."""
    return time.strftime("%H:%M:%S", time.localtime(call.issued_at))
