"""Finds where ranks have called different collectives at the same place; pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from fleetrun.postmortem.flightnames import (
    DESYNC,
    FlightFinding,
    JobRanks,
    at_site,
    describe_missing,
    described,
    named,
    of,
    who,
)
from fleetrun.postmortem.flightwaits import OpenCollective
from fleetrun.records.flightfile import (
    BACKWARD,
    NEW_GROUP,
    Collective,
    CollectiveChannel,
    FlightRecord,
)

# Collectives in which all ranks must have tensors of one size.
_SAME_SIZE = frozenset(
    (
        *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "scatter", "gather"),
        BACKWARD,
    )
)


def find(
    records: Mapping[int, FlightRecord],
    job: JobRanks,
    *,
    is_early: bool = False,
    waits: Sequence[OpenCollective] = (),
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
    differing = tuple(
        _desync(places[channel, number], job, waits, _siblings((channel, number), places, job))
        for channel, (_, number) in sorted(first.items(), key=lambda item: item[1])
    )
    # The first group of all ranks is made by no call.
    made = {
        wait.collective.channel.ranks
        for wait in waits
        if (len(wait.collective.channel.ranks), wait.collective.channel.number) != (job.ranks, 1)
    }
    return differing or _new_groups(records, job, made, is_early=is_early)


def _new_groups(
    records: Mapping[int, FlightRecord],
    job: JobRanks,
    waiting: AbstractSet[tuple[int, ...]],
    *,
    is_early: bool,
) -> tuple[FlightFinding, ...]:
    """Return the first call of new_group in which ranks wait for ranks that make another group.

    All ranks count these calls, and the members of a group meet in the call of the same number. On
    a device they only meet when they use it: WAITING are the ranks of groups in which some wait.
    """
    made: dict[int, dict[int, Collective]] = {}
    for rank, record in records.items():
        for call in record.collectives:
            if call.channel.operation == NEW_GROUP and not record.has_failed:
                made.setdefault(call.channel.number, {})[rank] = call
    for number, calls in sorted(made.items()):
        clashing = {
            ranks
            for call in calls.values()
            for member in call.channel.ranks
            if member in calls and calls[member].channel != call.channel
            if call.is_open or waiting & {call.channel.ranks, calls[member].channel.ranks}
            for ranks in (call.channel.ranks, calls[member].channel.ranks)
        }
        if not clashing:
            continue
        makers = {
            ranks: [rank for rank in sorted(calls) if calls[rank].channel.ranks == ranks]
            for ranks in clashing
        }
        is_majority = _has_majority(Counter({ranks: len(by) for ranks, by in makers.items()}))
        if is_early and not is_majority:
            continue
        ordered = sorted(makers.values(), key=lambda by: (len(by), by))
        parts = [
            f"{who(by, job)} called {NEW_GROUP} {of(calls[by[0]].channel, job)}"
            f"{at_site(calls[by[0]])}"
            for by in ordered
        ]
        text = f"{', '.join(parts[:-1])} where {parts[-1]}: call {number} of {NEW_GROUP}"
        odd = ordered[:-1] if is_majority else ordered
        return (FlightFinding(DESYNC, tuple(sorted(itertools.chain(*odd))), text),)
    return ()


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
    waits: Sequence[OpenCollective],
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
        f"{who(ranks, job)} called {described(calls[ranks[0]])}" for ranks in (*ordered[:-1], most)
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
    # Who has left out a call is ahead of the other, which waits for it and keeps the rest waiting.
    left_behind = {wait.rank for wait in waits if calls.keys() & {*wait.missing}}
    awaited = [
        rank
        for rank in sorted(calls.keys() - left_behind)
        if any(rank in wait.missing for wait in others)
    ]
    if len(awaited) != 1:
        unlike = [rank for rank in sorted(calls) if _kind(calls[rank]) not in _kinds(siblings)]
        if not siblings or len(unlike) == len(calls):
            return FlightFinding(DESYNC, tuple(sorted(calls)), text)
        other = next(iter(siblings.values()))
        text = (
            f"{text}; {who(sorted(siblings), job)} called {other.operation} at this place of "
            f"{of(other.channel, job).removeprefix('of ')}"
        )
        return FlightFinding(DESYNC, tuple(unlike), text)
    text = f"{text}; {describe_missing(awaited, others, job).text}"
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
        f"{who([source], job)} sends {sent} elements to {who([target], job)}, which expects "
        f"{expected}, in {named(call, job)}{at_site(call)}{more}"
    )
    if len(common) == 1:
        text = f"{who([*common], job)} splits its tensors unlike the rest: {text}"
    return FlightFinding(DESYNC, tuple(sorted(ranks)), text)
