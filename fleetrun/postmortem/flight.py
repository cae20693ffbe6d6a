"""Finds the ranks that keep others waiting, from the ranks' records of collectives; pure.

A rank in a collective that another rank has not entered waits for that rank. The cause is a rank
that is awaited and waits for nobody; else a cycle of ranks that wait for each other; else, if all
have entered, the network or a device.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from fleetrun.conversion import ranges
from fleetrun.records.flightfile import (
    ASYNCHRONOUS,
    BACKWARD,
    BLOCKING,
    NEW_GROUP,
    RAISED,
    Collective,
    CollectiveChannel,
    FlightRecord,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from fleetrun.records.rankfile import RankAxes

DESYNC, MISSING, CYCLE, UNFINISHED = "desync", "missing", "cycle", "unfinished"
# A rank is awaited that may itself wait for others, in collectives that are not recorded.
UNKNOWN = "unknown"
# Collectives in which all ranks must have tensors of one size.
_SAME_SIZE = frozenset(
    (
        *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "scatter", "gather"),
        BACKWARD,
    )
)
# What stands for several collectives.
_SEVERAL = frozenset((BACKWARD, "program"))
# Collectives whose root receives from all others.
_FROM_ALL = frozenset(("gather", "reduce"))
_OTHER = {"send": "recv", "recv": "send"}
_WAY = {"send": "to", "recv": "from"}
# In a running job, a collective that is open for longer is reported.
LATE_S = 2.0
# An asynchronous collective that a rank finds open this long after its call keeps it waiting.
_SETTLED_S = 0.5
# The most findings of one kind.
_MOST = 4


class FlightFinding(NamedTuple):
    """A finding: RANKS are the cause; none if no rank is."""

    kind: str
    ranks: tuple[int, ...]
    # A sentence without its end.
    text: str


class RankState(NamedTuple):
    """What is known about a rank besides its record."""

    # Where its main thread stands; empty: not known.
    place: str = ""
    has_ended: bool = False
    # Whether that is known to be outside of Paddle, which may call collectives itself.
    is_outside_paddle: bool = False


class JobRanks(NamedTuple):
    """The ranks of a job, for names."""

    ranks: int
    axes: RankAxes | None = None
    states: Mapping[int, RankState] = {}


# Two calls of a rank, one after the other.
_Step = tuple[Collective, Collective]
# The ranks that make a step, by the lines of both calls, and by their channels.
_StepIndex = dict[tuple[object, ...], dict[tuple[CollectiveChannel, CollectiveChannel], set[int]]]


class _OpenCollective(NamedTuple):
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
    states = dict(job.states)
    for rank, record in known.items():
        if record.has_ended:
            states[rank] = states.get(rank, RankState())._replace(has_ended=True)
    job = job._replace(states=states)
    if has_failed:
        known = {rank: _reopened(record) for rank, record in known.items()}
    opened = _without_early_ends(known)
    waits = _waits(opened, until)
    if not has_failed:
        opened = _with_polls(opened, waits)
        waits = _waits(opened, until)
    desync = desyncs(known, job, waits=waits)
    if desync:
        return desync
    known = opened
    awaited = _culprits(waits)
    culprits = [rank for rank in awaited if not may_wait(known[rank], job)]
    alone = _alone(culprits, waits, job)
    if alone:
        return alone
    if awaited:
        missing = tuple(_missing([rank], waits, job) for rank in culprits[:_MOST])
        return missing or (_unknown(awaited, waits, known, job),)
    outvoted = _outvoted(waits, job)
    if outvoted:
        return outvoted
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


def _without_early_ends(records: Mapping[int, FlightRecord]) -> dict[int, FlightRecord]:
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


def _with_polls(
    records: Mapping[int, FlightRecord], waits: Sequence[_OpenCollective]
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


# A desync -----------------------------------------------------------------------------------------


def desyncs(
    records: Mapping[int, FlightRecord],
    job: JobRanks,
    *,
    is_early: bool = False,
    waits: Sequence[_OpenCollective] = (),
) -> tuple[FlightFinding, ...]:
    """Return where ranks first called different collectives at the same position, if anywhere.

    A send and its recv are compared by size, if they are not done; the parts of an all_to_all by
    pairs of ranks.
    IS_EARLY: a tie is left out while ranks of its group may still show who is right. Of a tie, the
    rank that others await in their WAITS elsewhere is wrong.
    """
    places: dict[tuple[CollectiveChannel, int], dict[int, Collective]] = {}
    for rank, record in records.items():
        if not record.has_failed:
            for channel, number, collective in _numbered(record):
                places.setdefault((channel, number), {})[rank] = collective
    first: dict[CollectiveChannel, tuple[float, int]] = {}
    for (channel, number), calls in places.items():
        if not _differ(channel, calls, is_early=is_early):
            continue
        at = min(collective.issued_at for collective in calls.values())
        if channel not in first or at < first[channel][0]:
            first[channel] = at, number
    return tuple(
        _desync(places[channel, number], job, waits, _siblings((channel, number), places, job))
        for channel, (_, number) in sorted(first.items(), key=lambda item: item[1])
    )


def _siblings(
    place: tuple[CollectiveChannel, int],
    places: Mapping[tuple[CollectiveChannel, int], dict[int, Collective]],
    job: JobRanks,
) -> dict[int, Collective]:
    """Return the calls at PLACE of another group of its axis that has made the same calls before.

    All of its ranks have called the same there; empty if there is no such group, or they differ.
    """
    channel, number = place
    axis = "" if job.axes is None else job.axes.axis_of(channel.ranks)
    agreeing: list[dict[int, Collective]] = []
    for (other, at), calls in places.items():
        if (
            at == number
            and other.ranks != channel.ranks
            and other._replace(ranks=channel.ranks) == channel
            and (axis and job.axes is not None and job.axes.axis_of(other.ranks) == axis)
            and len(calls) == len(other.ranks)
            and len(_kinds(calls)) == 1
            and all(
                _kinds(places[channel, before]) == _kinds(places[other, before])
                for before in range(1, number)
                if (channel, before) in places and (other, before) in places
            )
        ):
            agreeing.append(calls)
    same = {kind for calls in agreeing for kind in _kinds(calls)}
    return agreeing[0] if len(same) == 1 else {}


def _kinds(calls: Mapping[int, Collective]) -> set[tuple[object, ...]]:
    """Return what CALLS are, their roots counted within their group."""
    return {_kind(call) for call in calls.values()}


def _kind(call: Collective) -> tuple[object, ...]:
    ranks = call.channel.ranks
    root = ranks.index(call.root) if call.root in ranks else -1
    size = math.prod(call.shape) if call.operation.partition(" ")[0] in _SAME_SIZE else 0
    return call.operation, call.dtype, root, size


def _numbered(record: FlightRecord) -> Iterator[tuple[CollectiveChannel, int, Collective]]:
    """Yield the calls of RECORD that are compared, newest first, with their positions.

    Backwards, in which Paddle's own reducer sums gradients, count among the calls of their group.
    """
    newest = dict(record.last)
    for call in record.collectives:
        newest[call.channel] = call.sequence
    later: Counter[CollectiveChannel] = Counter()
    for call in reversed(record.collectives):
        channel = call.channel._replace(operation="")
        if channel.is_pair:
            yield channel, call.sequence, call
        elif call.channel.operation in {"", BACKWARD}:
            issued = sum(newest.get(channel._replace(operation=name), 0) for name in ("", BACKWARD))
            yield channel, issued - later[channel], call
            later[channel] += 1


def _differ(channel: CollectiveChannel, calls: Mapping[int, Collective], *, is_early: bool) -> bool:
    counts = Counter(_signatures(calls).values())
    if channel.is_pair:
        return len(counts) > 1 and any(call.is_open for call in calls.values())
    if len(counts) == 1 and next(_unequal_parts(calls), None) is not None:
        return not is_early or len(calls) == len(channel.ranks)
    is_tied = len(calls) < len(channel.ranks) and not _has_majority(counts)
    return len(counts) > 1 and not (is_early and is_tied)


def _signatures(calls: Mapping[int, Collective]) -> dict[int, tuple[object, ...]]:
    """Return by rank the properties that must be equal on all ranks."""
    return {
        rank: (call.nbytes,) if call.channel.is_pair else _kind(call)
        for rank, call in calls.items()
    }


def _unequal_parts(calls: Mapping[int, Collective]) -> Iterator[tuple[int, int, int, int]]:
    """Yield which rank sends how much in CALLS to which rank that expects how much else."""
    for rank, call in sorted(calls.items()):
        ranks = call.channel.ranks
        for target, sent in zip(ranks, call.parts[: len(ranks)], strict=bool(call.parts)):
            parts = calls[target].parts if target in calls else ()
            if (
                parts
                and rank in ranks
                and sent != (expected := parts[len(ranks) :][ranks.index(rank)])
            ):
                yield rank, target, sent, expected


def _has_majority(counts: Counter[tuple[object, ...]]) -> bool:
    """Whether more ranks made one call than any other."""
    most = [number for _, number in counts.most_common(2)]
    return len(most) == 1 or most[0] > most[1]


def _desync(
    calls: Mapping[int, Collective],
    job: JobRanks,
    waits: Sequence[_OpenCollective],
    siblings: Mapping[int, Collective],
) -> FlightFinding:
    signatures = _signatures(calls)
    if len(set(signatures.values())) == 1:
        return _unequal([*_unequal_parts(calls)], calls, job)
    is_majority = _has_majority(Counter(signatures.values()))
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(calls):
        groups.setdefault(signatures[rank], []).append(rank)
    # The most last.
    ordered = sorted(groups.values(), key=lambda ranks: (len(ranks), ranks))
    most = ordered[-1]
    odd = tuple(sorted(rank for ranks in ordered[:-1] for rank in ranks))
    channel, sequence = calls[most[0]].channel, calls[most[0]].sequence
    parts = [
        f"{_who(ranks, job)} called {_call(calls[ranks[0]])}" for ranks in (*ordered[:-1], most)
    ]
    kind = "message" if channel.is_pair else channel.operation or "collective"
    text = f"{', '.join(parts[:-1])} where {parts[-1]}: {kind} {sequence} {of(channel, job)}"
    if is_majority:
        return FlightFinding(DESYNC, odd, text)
    # In a group of several of them, one may only be slower than the other.
    others = [
        wait
        for wait in waits
        if wait.rank not in calls and len(calls.keys() & {*wait.collective.channel.ranks}) < 2
    ]
    awaited = [rank for rank in sorted(calls) if any(rank in wait.missing for wait in others)]
    if len(awaited) != 1:
        unlike = [rank for rank in sorted(calls) if _kind(calls[rank]) not in _kinds(siblings)]
        if not siblings or len(unlike) == len(calls):
            return FlightFinding(DESYNC, tuple(sorted(calls)), text)
        other = next(iter(siblings.values()))
        text = (
            f"{text}; {_who(sorted(siblings), job)} called {other.operation} at this place of "
            f"{of(other.channel, job).removeprefix('of ')}"
        )
        return FlightFinding(DESYNC, tuple(unlike), text)
    text = f"{text}; {_missing(awaited, others, job).text}"
    return FlightFinding(DESYNC, tuple(awaited), text)


def _unequal(
    unequal: Sequence[tuple[int, int, int, int]], calls: Mapping[int, Collective], job: JobRanks
) -> FlightFinding:
    """Describe UNEQUAL parts; blame the ranks at one end of all of them."""
    common = set.intersection(*({source, target} for source, target, *_ in unequal))
    ranks = common or {rank for ends in unequal for rank in ends[:2]}
    source, target, sent, expected = unequal[0]
    call = calls[source]
    more = f"; {len(unequal)} parts differ" if len(unequal) > 1 else ""
    text = (
        f"{_who([source], job)} sends {sent} elements to {_who([target], job)}, which expects "
        f"{expected}, in {_named(call, job)}{_at(call)}{more}"
    )
    if len(common) == 1:
        text = f"{_who([*common], job)} splits its tensors unlike the rest: {text}"
    return FlightFinding(DESYNC, tuple(sorted(ranks)), text)


def _call(call: Collective) -> str:
    root = f" (root {call.root})" if call.root >= 0 else ""
    tensor = f" of {call.tensor}" if call.tensor else ""
    return f"{call.operation}{tensor}{root}{_at(call)}"


def _at(call: Collective) -> str:
    if call.site is None:
        return ""
    file, line, _ = call.site
    return f" in {file.rpartition('/')[2]}:{line}"


# Waits -----------------------------------------------------------------------------------------


def _waits(records: Mapping[int, FlightRecord], until: float) -> list[_OpenCollective]:
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
    waits = []
    for rank, record in sorted(records.items()):
        seen: set[tuple[CollectiveChannel, bool]] = set()
        for collective in record.collectives:
            channel = collective.channel
            if not collective.is_open or collective.issued_at > until or (channel, True) in seen:
                continue
            missing = tuple(_absent(rank, collective, last))
            if (channel, bool(missing)) not in seen:
                seen.add((channel, bool(missing)))
                holds_up = (
                    bool(missing)
                    or collective.state == BLOCKING
                    or (channel, collective.sequence) in stuck
                )
                is_first = collective == _oldest_open(record)
                behind = tuple(_behind(rank, collective, records)) if is_first else ()
                waits.append(_OpenCollective(rank, collective, missing, holds_up, behind))
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
    return [peer], channel._replace(operation=_OTHER[channel.operation])


def _culprits(waits: Sequence[_OpenCollective]) -> list[int]:
    """Return the ranks that are awaited and wait for nobody, longest awaited first."""
    waiting = {wait.rank for wait in waits if wait.holds_up}
    since: dict[int, float] = {}
    for wait in waits:
        for member in wait.missing:
            if member not in waiting:
                known = since.get(member, wait.collective.issued_at)
                since[member] = min(known, wait.collective.issued_at)
    return sorted(since, key=lambda rank: (since[rank], rank))


def may_wait(record: FlightRecord, job: JobRanks) -> bool:
    """Whether the rank of RECORD may wait in a collective that is not recorded."""
    state = job.states.get(record.rank, RankState())
    return bool(record.unrecorded) and not (state.has_ended or state.is_outside_paddle)


def waiting(
    records: Mapping[int, FlightRecord], until: float
) -> dict[int, tuple[Collective, tuple[int, ...]]]:
    """Return by rank the oldest collective in which it waits, and for which ranks if that is known.

    A collective that was issued after UNTIL may be in progress.
    """
    known = {rank: record for rank, record in records.items() if not record.has_failed}
    known = _without_early_ends(known)
    waiting: dict[int, tuple[Collective, tuple[int, ...]]] = {}
    for wait in sorted(_waits(known, until), key=lambda wait: wait.collective.issued_at):
        if wait.holds_up:
            waiting.setdefault(wait.rank, (wait.collective, wait.missing))
    return dict(sorted(waiting.items()))


def _alone(
    culprits: Sequence[int], waits: Sequence[_OpenCollective], job: JobRanks
) -> tuple[FlightFinding, ...]:
    """Return the ranks in a collective without which most others have ended, all of CULPRITS."""
    if not culprits or not all(job.states.get(rank, RankState()).has_ended for rank in culprits):
        return ()
    # What runs on a device may be done, though nobody has looked since.
    first, waiting_ranks = _oldest([wait for wait in waits if culprits[0] in wait.missing])
    if first.channel.is_pair or len(culprits) <= len(waiting_ranks):
        return ()
    text = (
        f"{_who(waiting_ranks, job)} entered {_named(first, job)}{_at(first)}, without which "
        f"{_who(culprits, job)} ended"
    )
    return (FlightFinding(DESYNC, tuple(waiting_ranks), text),)


def _outvoted(waits: Sequence[_OpenCollective], job: JobRanks) -> tuple[FlightFinding, ...]:
    """Return the ranks that wait for all of a group while most of it waits elsewhere for them.

    Calls of two groups of the same ranks, backwards and new groups are not compared by position.
    """
    first: dict[tuple[int, ...], dict[int, _OpenCollective]] = {}
    for wait in sorted(waits, key=lambda wait: wait.collective.issued_at):
        if wait.awaited and not wait.collective.channel.is_pair:
            first.setdefault(wait.collective.channel.ranks, {}).setdefault(wait.rank, wait)
    for ranks, wait_of in first.items():
        at = {rank: wait.collective.channel for rank, wait in wait_of.items()}
        ((most, votes),) = Counter(at.values()).most_common(1)
        if len(wait_of) == len(ranks) != votes > len(ranks) / 2:
            right = [wait_of[rank] for rank in ranks if at[rank] == most]
            fewer = [rank for rank in ranks if any(rank in wait.missing for wait in right)]
            if fewer:
                return tuple(
                    _missing([rank], right, job, within=wait_of[rank].collective)
                    for rank in fewer[:_MOST]
                )
    return ()


def _unknown(
    ranks: Sequence[int],
    waits: Sequence[_OpenCollective],
    records: Mapping[int, FlightRecord],
    job: JobRanks,
) -> FlightFinding:
    """Describe the oldest collective that any of RANKS never entered; blame nobody."""
    awaiting = [wait for wait in waits if any(rank in wait.missing for rank in ranks)]
    first = min(awaiting, key=lambda wait: (wait.collective.issued_at, wait.rank))
    late = [rank for rank in sorted(ranks) if rank in first.missing]
    unrecorded = " and ".join(sorted({what for rank in late for what in records[rank].unrecorded}))
    reserve = f"may wait elsewhere, as collectives of {unrecorded} are not recorded, and "
    text = _missing(late, awaiting, job, reserve=reserve).text
    return FlightFinding(UNKNOWN, (), text)


def _missing(
    ranks: Sequence[int],
    waits: Sequence[_OpenCollective],
    job: JobRanks,
    *,
    within: Collective | None = None,
    reserve: str = "",
) -> FlightFinding:
    """Describe the collective that RANKS never entered, and the ranks that wait there.

    They wait themselves WITHIN another one, if that is given. RESERVE is said of them first.
    """
    first, waiting_ranks = _oldest([wait for wait in waits if ranks[0] in wait.missing])
    channel = first.channel
    if channel.is_pair:
        opposite = _OTHER[channel.operation]
        action = f"made {opposite} {first.sequence} {_WAY[opposite]} {_who(waiting_ranks[:1], job)}"
        waiter = f", which waits in {channel.operation}{_at(first)} since {_since(first)}"
    else:
        action = f"entered {_named(first, job)}"
        waiting = (
            f"{_who(waiting_ranks, job)} waits"
            if len(waiting_ranks) == 1
            else f"{len(waiting_ranks)} others wait"
        )
        waiter = f"; {waiting} there{_at(first)} since {_since(first)}"
    text = f"{_who(ranks, job)} {reserve}never {action}{waiter}"
    if within is not None:
        text = f"{text}; it waits in {_named(within, job)}{_at(within)}"
        return FlightFinding(DESYNC, tuple(ranks), text)
    stands = _it(ranks[0], job) if len(ranks) == 1 else ""
    return FlightFinding(MISSING, tuple(ranks), f"{text}{stands}")


def _oldest(waits: Sequence[_OpenCollective]) -> tuple[Collective, list[int]]:
    """Return the collective of WAITS that was issued first, and the ranks that wait in it."""
    first = min(waits, key=lambda wait: (wait.collective.issued_at, wait.rank)).collective
    place = first.channel, first.sequence
    return first, [
        wait.rank for wait in waits if (wait.collective.channel, wait.collective.sequence) == place
    ]


def _since(call: Collective) -> str:
    return time.strftime("%H:%M:%S", time.localtime(call.issued_at))


def _named(call: Collective, job: JobRanks) -> str:
    # A new group is the only one of its channel, which has the number of its call.
    number = call.channel.number if call.channel.operation == NEW_GROUP else call.sequence
    return f"{call.operation} {number} {of(call.channel, job)}"


def _it(rank: int, job: JobRanks) -> str:
    state = job.states.get(rank, RankState())
    if state.has_ended:
        return "; it has ended"
    return f"; it stands in {state.place}" if state.place else ""


def _cycle(waits: Sequence[_OpenCollective]) -> list[_OpenCollective]:
    """Return a cycle of waits, each rank missing in the one before; empty if there is none.

    >>> _cycle([])
    []
    """
    for start in waits:
        # By rank: the wait that has led to it.
        path: dict[int, _OpenCollective] = {}
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


def _strayed(cycle: Sequence[_OpenCollective], records: Mapping[int, FlightRecord]) -> list[int]:
    """Return the ranks of CYCLE that deviate from the order of their earlier calls.

    If that is not one rank: those that left it anywhere before. What another rank does, too, is no
    deviation.
    """
    last: list[int] = []
    anywhere: list[int] = []
    made = _made_by(records)
    for wait in cycle:
        record = records[wait.rank]
        place = record.collectives.index(wait.collective)
        steps = itertools.pairwise(record.collectives[: place + 1])
        left = [step for step in _departures(steps) if not _is_shared(wait.rank, step, made)]
        if left:
            anywhere.append(wait.rank)
        if left and left[-1][1] is record.collectives[place]:
            last.append(wait.rank)
    return last if len(last) == 1 or len(anywhere) != 1 else anywhere


def _departures(steps: Iterable[_Step]) -> list[_Step]:
    """Return the STEPS from a call to one that has never followed it, but another.

    A call that is new altogether belongs to no order yet.
    """
    followers: dict[object, set[object]] = {}
    known: set[object] = set()
    departures = []
    for step in steps:
        before, after = ((call.channel, call.operation, call.site) for call in step)
        following = followers.setdefault(before, set())
        if following and after in known - following:
            departures.append(step)
        following.add(after)
        known |= {before, after}
    return departures


def _made_by(records: Mapping[int, FlightRecord]) -> _StepIndex:
    """Return which ranks go from one line and operation to another, and in which groups."""
    made: _StepIndex = {}
    for rank, record in records.items():
        for before, after in itertools.pairwise(record.collectives):
            groups = made.setdefault(_lines(before, after), {})
            groups.setdefault((before.channel, after.channel), set()).add(rank)
    return made


def _lines(*calls: Collective) -> tuple[object, ...]:
    return tuple((call.operation, call.site) for call in calls)


def _is_shared(rank: int, step: _Step, made: _StepIndex) -> bool:
    """Whether another rank than RANK makes STEP: in the same groups, as far as it is in them.

    Of a group that it is not in, it may have a sibling, such as its own data-parallel group.
    """
    return any(
        other != rank
        and any(other in call.channel.ranks for call in step)
        and all(
            channel == call.channel or channel.is_pair
            if other in call.channel.ranks
            else len(channel.ranks) == len(call.channel.ranks)
            for channel, call in zip(channels, step, strict=True)
        )
        for channels, ranks in made.get(_lines(*step), {}).items()
        for other in ranks
    )


def _drawn(
    cycle: Sequence[_OpenCollective], records: Mapping[int, FlightRecord], job: JobRanks
) -> FlightFinding:
    """Describe CYCLE; blame a single rank that has left the order of its earlier calls."""
    ranks = [wait.rank for wait in cycle]
    circle = " → ".join(str(rank) for rank in (*ranks, ranks[0]))
    parts = []
    for wait, awaited in zip(cycle, [*ranks[1:], ranks[0]], strict=True):
        call = wait.collective
        if call.channel.is_pair:
            where = (
                f"{call.operation} {call.sequence} {_WAY[call.channel.operation]} rank {awaited}"
            )
        else:
            where = _named(call, job)
        parts.append(f"{_who([wait.rank], job)} in {where}{_at(call)}")
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
    """Describe a wait for a store; else the oldest collective that none of its ranks finishes."""
    keyless = [wait for wait in waits if wait.collective.channel.is_store]
    if keyless:
        return (_keyless(keyless, waits, job),)
    entered = [wait for wait in waits if not wait.missing and _all_known(wait, records)]
    if not entered:
        return ()
    first, waiting_ranks = _oldest([wait for wait in entered if wait.holds_up] or entered)
    verb = "waits" if len(waiting_ranks) == 1 else "wait"
    reason = "no rank is missing, so the network or a device holds it up"
    if first.operation.partition(" ")[0] in _SEVERAL:
        reason = (
            "no rank is missing, but its collectives, which are not recorded one by one, may differ"
        )
    places = _places(first, records)
    if first.state == BLOCKING and len(places) > 1:
        calls = ", ".join(f"call {place} of {_who(places[place], job)}" for place in places)
        reason = (
            "Paddle pairs the calls of a gloo group by their number, sends and recvs included, "
            f"and it is {calls}; a group of its own for each pair of ranks avoids that"
        )
    text = (
        f"all its ranks have entered {_named(first, job)}, and {_who(waiting_ranks, job)} {verb} "
        f"there{_at(first)} since {_since(first)}: {reason}"
    )
    return (FlightFinding(UNFINISHED, (), text),)


def _keyless(
    stores: Sequence[_OpenCollective], waits: Sequence[_OpenCollective], job: JobRanks
) -> FlightFinding:
    """Describe the waits for keys in STORES, which any rank may have to write."""
    call = min((wait.collective for wait in stores), key=lambda call: call.issued_at)
    ranks = sorted({wait.rank for wait in stores})
    verb = "waits" if len(ranks) == 1 else "wait"
    text = (
        f"{_who(ranks, job)} {verb} in {call.operation}{_at(call)} since {_since(call)}, for "
        "what no rank writes there"
    )
    for_them = [wait for wait in waits if any(rank in wait.missing for rank in ranks)]
    if for_them:
        first, waiting_ranks = _oldest(for_them)
        verb = "waits" if len(waiting_ranks) == 1 else "wait"
        them = "it" if len(ranks) == 1 else "them"
        text += (
            f"; {_who(waiting_ranks, job)} {verb} for {them} in {_named(first, job)}{_at(first)}"
        )
    return FlightFinding(UNFINISHED, (), text)


def _places(entered: Collective, records: Mapping[int, FlightRecord]) -> dict[int, list[int]]:
    """Return which call of its group ENTERED is, barriers left out, and for which ranks."""
    channel = entered.channel
    ends = {channel.source: "send", channel.target: "recv"} if channel.is_pair else {}
    places: dict[int, list[int]] = {}
    for rank in sorted(ends) or channel.ranks:
        own = channel._replace(operation=ends.get(rank, channel.operation))
        record = records[rank]
        issued = sum(record.last[other] for other in record.last if _is_counted(other, channel))
        calls = [call for call in record.collectives if _is_counted(call.channel, channel)]
        while calls and (calls[-1].channel, calls[-1].sequence) != (own, entered.sequence):
            calls.pop()
            issued -= 1
        issued -= sum(call.operation == "barrier" for call in calls)
        places.setdefault(issued, []).append(rank)
    return places


def _is_counted(channel: CollectiveChannel, like: CollectiveChannel) -> bool:
    """Whether calls on CHANNEL are of the group of LIKE; backwards are not single calls."""
    same_group = (channel.ranks, channel.number) == (like.ranks, like.number)
    return same_group and channel.operation in {"", *_OTHER}


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
    """Name the group of CHANNEL: `of mp [8-15]`, `of all ranks`.

    >>> of(CollectiveChannel((0, 1)), JobRanks(2)), of(CollectiveChannel((0, 2), 3), JobRanks(4))
    ('of all ranks', 'of ranks 0, 2 (their group 3)')
    >>> from fleetrun.records.rankfile import RankAxes
    >>> of(CollectiveChannel((2, 3), 2), JobRanks(4, RankAxes((("dp", 2), ("mp", 2)))))
    'of mp [2-3] (their group 2)'
    """
    if channel.is_pair:
        return f"from rank {channel.source} to rank {channel.target}"
    if channel.is_store:
        return f"by rank {channel.ranks[0]}"
    is_numbered = channel.number > 1 and channel.operation != NEW_GROUP
    number = f" (their group {channel.number})" if is_numbered else ""
    if len(channel.ranks) == job.ranks:
        return f"of all ranks{number}"
    axis = job.axes.axis_of(channel.ranks) if job.axes is not None else ""
    numbers = ranges(channel.ranks)
    return f"of {axis} [{numbers}]{number}" if axis else f"of ranks {numbers}{number}"


def table(records: Iterable[FlightRecord], most: int) -> list[tuple[FlightRecord, Collective]]:
    """Return the newest collectives of all RECORDS, at most MOST of each, in order of issue."""
    rows = [(record, collective) for record in records for collective in record.collectives[-most:]]
    return sorted(rows, key=lambda row: (row[1].issued_at, row[0].rank))
