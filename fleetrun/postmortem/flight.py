"""Finds the ranks that keep the others waiting, from the ranks' records of collectives; pure.

A rank in a collective that another has not entered waits for that one. The cause is the rank that
is waited for and waits for nobody; else a circle of ranks that wait for each other; else, if all
ranks have entered, the network or a device.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.conversion import ranges
from fleetrun.records.flightfile import (
    BLOCKING,
    RAISED,
    Collective,
    CollectiveChannel,
    FlightRecord,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from fleetrun.records.rankfile import RankAxes

DESYNC, MISSING, CYCLE, UNFINISHED = "desync", "missing", "cycle", "unfinished"
# Collectives in which all ranks must have tensors of one size.
_SAME_SIZE = frozenset(("all_reduce", "reduce", "broadcast", "all_gather"))
_OTHER = {"send": "recv", "recv": "send"}
_WAY = {"send": "to", "recv": "from"}
# In a running job, a collective that is open for longer is reported.
LATE_S = 2.0
# The most findings of one kind.
_MOST = 4


class FlightFinding(NamedTuple):
    """A finding: RANKS are the cause; none if no rank is."""

    kind: str
    ranks: tuple[int, ...]
    # A sentence without its end.
    text: str


class RankState(NamedTuple):
    """What is known of a rank beside its record."""

    # Where its main thread stands; empty: not known.
    place: str = ""
    has_ended: bool = False


class JobRanks(NamedTuple):
    """The ranks of a job, for names."""

    ranks: int
    axes: RankAxes | None = None
    states: Mapping[int, RankState] = {}


class _OpenCollective(NamedTuple):
    """A rank that is in a collective, and the ranks that have not entered it."""

    rank: int
    collective: Collective
    missing: tuple[int, ...]


def verdict(
    records: Mapping[int, FlightRecord],
    job: JobRanks,
    *,
    has_failed: bool = False,
    until: float = math.inf,
) -> tuple[FlightFinding, ...]:
    """Return why the ranks of these RECORDS hang; nothing if the records do not tell.

    HAS_FAILED: the job ended; a rank that raised in a collective counts as waiting there. What was
    issued after UNTIL may be in progress.
    """
    known = {rank: one for rank, one in records.items() if not one.has_failed}
    if has_failed:
        known = {rank: _reopened(one) for rank, one in known.items()}
    found = desyncs(known, job)
    if found:
        return found
    waits = [wait for rank in sorted(known) for wait in _waits(rank, known, until)]
    culprits = _culprits(waits)
    if culprits:
        return tuple(_missing(rank, waits, job) for rank in culprits[:_MOST])
    cycle = _cycle(waits)
    if cycle:
        return (_drawn(cycle, known, job),)
    return _unfinished(waits, known, job)


def _reopened(record: FlightRecord) -> FlightRecord:
    """Return RECORD as if its rank still waited in its last collective, if that has raised."""
    *earlier, final = record.collectives or (None,)
    if final is None or final.state != RAISED:
        return record
    return record._replace(collectives=(*earlier, final._replace(state=BLOCKING)))


# A desync -----------------------------------------------------------------------------------------


def desyncs(records: Mapping[int, FlightRecord], job: JobRanks) -> tuple[FlightFinding, ...]:
    """Return where ranks first called different collectives at one place, if they have."""
    places: dict[tuple[CollectiveChannel, int], dict[int, Collective]] = {}
    for rank, record in records.items():
        for one in () if record.has_failed else record.collectives:
            if not one.channel.operation:
                places.setdefault((one.channel, one.sequence), {})[rank] = one
    first: dict[CollectiveChannel, tuple[float, dict[int, Collective]]] = {}
    for (channel, _), calls in places.items():
        if len(calls) < 2 or len(set(_signatures(calls).values())) < 2:
            continue
        at = min(one.issued_at for one in calls.values())
        if channel not in first or at < first[channel][0]:
            first[channel] = at, calls
    return tuple(_desync(calls, job) for _, calls in sorted(first.values(), key=lambda one: one[0]))


def _signatures(calls: Mapping[int, Collective]) -> dict[int, tuple[object, ...]]:
    """Return by rank what must be the same on all of them."""
    return {
        rank: (
            one.operation,
            one.dtype,
            one.root,
            math.prod(one.shape) if one.operation.partition(" ")[0] in _SAME_SIZE else 0,
        )
        for rank, one in calls.items()
    }


def _desync(calls: Mapping[int, Collective], job: JobRanks) -> FlightFinding:
    signatures = _signatures(calls)
    counts = Counter(signatures.values()).most_common()
    is_majority = len(counts) == 1 or counts[0][1] > counts[1][1]
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(calls):
        groups.setdefault(signatures[rank], []).append(rank)
    # The most last.
    ordered = sorted(groups.values(), key=lambda ranks: (len(ranks), ranks))
    most = ordered[-1]
    odd = tuple(sorted(rank for ranks in ordered[:-1] for rank in ranks))
    channel, sequence = calls[most[0]].channel, calls[most[0]].sequence
    told = [
        f"{_who(ranks, job)} called {_call(calls[ranks[0]])}" for ranks in (*ordered[:-1], most)
    ]
    text = f"{', '.join(told[:-1])} where {told[-1]}: collective {sequence} {of(channel, job)}"
    return FlightFinding(DESYNC, odd if is_majority else tuple(sorted(calls)), text)


def _call(one: Collective) -> str:
    root = f" (root {one.root})" if one.root >= 0 else ""
    tensor = f" of {one.tensor}" if one.tensor else ""
    return f"{one.operation}{tensor}{root}{_at(one)}"


def _at(one: Collective) -> str:
    if one.site is None:
        return ""
    file, line, _ = one.site
    return f" in {file.rpartition('/')[2]}:{line}"


# Who waits for whom -------------------------------------------------------------------------------


def _waits(
    rank: int, records: Mapping[int, FlightRecord], until: float
) -> Iterator[_OpenCollective]:
    """Yield the oldest open collective of each channel of RANK."""
    seen: set[CollectiveChannel] = set()
    for one in records[rank].collectives:
        if one.is_open and one.channel not in seen and one.issued_at <= until:
            seen.add(one.channel)
            yield _OpenCollective(rank, one, tuple(_absent(rank, one, records)))


def _absent(rank: int, one: Collective, records: Mapping[int, FlightRecord]) -> Iterator[int]:
    channel = one.channel
    if channel.is_pair:
        peer = channel.target if channel.operation == "send" else channel.source
        members, channel = [peer], channel._replace(operation=_OTHER[channel.operation])
    else:
        members = [other for other in channel.ranks if other != rank]
    for member in members:
        if member in records and records[member].last.get(channel, 0) < one.sequence:
            yield member


def _culprits(waits: Sequence[_OpenCollective]) -> list[int]:
    """Return the ranks that are waited for and wait for nobody: the one longest awaited first."""
    waiting = {wait.rank for wait in waits if _holds_up(wait)}
    since: dict[int, float] = {}
    for wait in waits:
        for member in wait.missing:
            if member not in waiting:
                known = since.get(member, wait.collective.issued_at)
                since[member] = min(known, wait.collective.issued_at)
    return sorted(since, key=lambda rank: (since[rank], rank))


def _holds_up(wait: _OpenCollective) -> bool:
    """Whether its rank waits: an asynchronous one that all have entered holds nothing up."""
    return bool(wait.missing) or wait.collective.state == BLOCKING


def waiting(
    records: Mapping[int, FlightRecord], until: float
) -> dict[int, tuple[Collective, tuple[int, ...]]]:
    """Return by rank the oldest collective in which it waits, and for which ranks if that is known.

    A collective that was issued after UNTIL may be in progress.
    """
    known = {rank: record for rank, record in records.items() if not record.has_failed}
    found = {}
    for rank in known:
        waits = [wait for wait in _waits(rank, known, until) if _holds_up(wait)]
        if waits:
            first = min(waits, key=lambda wait: wait.collective.issued_at)
            found[rank] = first.collective, first.missing
    return found


def _missing(rank: int, waits: Sequence[_OpenCollective], job: JobRanks) -> FlightFinding:
    """Report the collective that RANK has never entered, and the ranks that wait there."""
    first, there = _oldest([wait for wait in waits if rank in wait.missing])
    channel = first.channel
    if channel.is_pair:
        other = _OTHER[channel.operation]
        what = f"made {other} {first.sequence} {_WAY[other]} {_who(there[:1], job)}"
        waiter = f", which waits in {channel.operation}{_at(first)} since {_since(first)}"
    else:
        what = f"entered {_named(first, job)}"
        waiting = f"{_who(there, job)} waits" if len(there) == 1 else f"{len(there)} others wait"
        waiter = f"; {waiting} there{_at(first)} since {_since(first)}"
    return FlightFinding(
        MISSING, (rank,), f"{_who([rank], job)} never {what}{waiter}{_it(rank, job)}"
    )


def _oldest(waits: Sequence[_OpenCollective]) -> tuple[Collective, list[int]]:
    """Return the collective of WAITS that was issued first, and the ranks that wait in it."""
    first = min(waits, key=lambda wait: (wait.collective.issued_at, wait.rank)).collective
    place = first.channel, first.sequence
    return first, [
        wait.rank for wait in waits if (wait.collective.channel, wait.collective.sequence) == place
    ]


def _since(one: Collective) -> str:
    return time.strftime("%H:%M:%S", time.localtime(one.issued_at))


def _named(one: Collective, job: JobRanks) -> str:
    return f"{one.operation} {one.sequence} {of(one.channel, job)}"


def _it(rank: int, job: JobRanks) -> str:
    state = job.states.get(rank, RankState())
    if state.has_ended:
        return "; it has ended"
    return f"; it stands in {state.place}" if state.place else ""


def _cycle(waits: Sequence[_OpenCollective]) -> list[_OpenCollective]:
    """Return a circle of waits, the rank of each missing in the one before; empty if there is none.

    >>> _cycle([])
    []
    """
    for start in waits:
        # By rank: the wait that has led to it.
        path: dict[int, _OpenCollective] = {}
        todo = [start]
        while todo:
            wait = todo.pop()
            for member in wait.missing:
                if member in path:
                    continue
                path[member] = wait
                todo += [other for other in waits if other.rank == member]
        if start.rank in path:
            found = [path[start.rank]]
            while found[-1].rank != start.rank:
                found.append(path[found[-1].rank])
            return found[::-1]
    return []


def _strayed(cycle: Sequence[_OpenCollective], records: Mapping[int, FlightRecord]) -> list[int]:
    """Return the ranks of CYCLE that never before issued this collective after the previous one."""
    found = []
    for wait in cycle:
        calls = [(one.channel, one.operation, one.site) for one in records[wait.rank].collectives]
        place = records[wait.rank].collectives.index(wait.collective)
        steps = list(itertools.pairwise(calls[:place]))
        if place == 0 or (calls[place - 1], calls[place]) not in steps:
            found.append(wait.rank)
    return found


def _drawn(
    cycle: Sequence[_OpenCollective], records: Mapping[int, FlightRecord], job: JobRanks
) -> FlightFinding:
    """Draw CYCLE; if just one rank in it has left the order of its earlier calls, name that."""
    ranks = [wait.rank for wait in cycle]
    circle = " → ".join(str(rank) for rank in (*ranks, ranks[0]))
    parts = []
    for wait, awaited in zip(cycle, [*ranks[1:], ranks[0]], strict=True):
        one = wait.collective
        if one.channel.is_pair:
            what = f"{one.operation} {one.sequence} {_WAY[one.channel.operation]} rank {awaited}"
        else:
            what = _named(one, job)
        parts.append(f"{_who([wait.rank], job)} in {what}{_at(one)}")
    text = f"ranks wait for each other in a circle, {circle}: {'; '.join(parts)}"
    strayed = _strayed(cycle, records)
    if len(strayed) == 1:
        text = f"{_who(strayed, job)} has left the order of its earlier calls; {text}"
    else:
        strayed = ranks
    return FlightFinding(CYCLE, tuple(sorted(set(strayed))), text)


def _unfinished(
    waits: Sequence[_OpenCollective], records: Mapping[int, FlightRecord], job: JobRanks
) -> tuple[FlightFinding, ...]:
    """Report the oldest collective that all ranks have entered and none finishes."""
    entered = [wait for wait in waits if not wait.missing and _all_known(wait, records)]
    if not entered:
        return ()
    first, there = _oldest(entered)
    verb = "waits" if len(there) == 1 else "wait"
    text = (
        f"all its ranks have entered {_named(first, job)}, and {_who(there, job)} {verb} there"
        f"{_at(first)} since {_since(first)}: no rank is missing, so the network or a device holds "
        "it up"
    )
    return (FlightFinding(UNFINISHED, (), text),)


def _all_known(wait: _OpenCollective, records: Mapping[int, FlightRecord]) -> bool:
    channel = wait.collective.channel
    pair = (channel.source, channel.target)
    return all(rank in records for rank in (pair if channel.is_pair else channel.ranks))


# Names --------------------------------------------------------------------------------------------


def _who(ranks: Sequence[int], job: JobRanks) -> str:
    place = job.axes.place(ranks[0]) if job.axes is not None and len(ranks) == 1 else ""
    where = f" ({place})" if place else ""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}{where}"


def of(channel: CollectiveChannel, job: JobRanks) -> str:
    """Say of which group something is: `of mp [8-15]`, `of all ranks`.

    >>> of(CollectiveChannel((0, 1)), JobRanks(2)), of(CollectiveChannel((0, 2)), JobRanks(4))
    ('of all ranks', 'of ranks 0, 2')
    """
    if channel.is_pair:
        return f"from rank {channel.source} to rank {channel.target}"
    if len(channel.ranks) == job.ranks:
        return "of all ranks"
    axis = job.axes.axis_of(channel.ranks) if job.axes is not None else ""
    return f"of {axis} [{ranges(channel.ranks)}]" if axis else f"of ranks {ranges(channel.ranks)}"


def table(records: Iterable[FlightRecord], most: int) -> list[tuple[FlightRecord, Collective]]:
    """Return the newest collectives of all RECORDS, at most MOST of each, as they were issued."""
    rows = [(one, each) for one in records for each in one.collectives[-most:]]
    return sorted(rows, key=lambda row: (row[1].issued_at, row[0].rank))
