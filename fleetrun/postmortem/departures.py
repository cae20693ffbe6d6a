"""Finds the rank of a cycle that has left the order of its earlier calls; pure."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from fleetrun.records.flightfile import Collective, CollectiveChannel, FlightRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fleetrun.postmortem.flightwaits import OpenCollective

# Two calls of a rank, one after the other.
_Step = tuple[Collective, Collective]
# The ranks that make a step, by the lines of both calls, and by their channels.
_StepIndex = dict[tuple[object, ...], dict[tuple[CollectiveChannel, CollectiveChannel], set[int]]]


def find_strayed(cycle: Sequence[OpenCollective], records: Mapping[int, FlightRecord]) -> list[int]:
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


def find_uneven(
    cycle: Sequence[OpenCollective], records: Mapping[int, FlightRecord]
) -> tuple[list[int], CollectiveChannel | None]:
    """Return the ranks of CYCLE that call others than most since all of a group met, and the group.

    That must be the first difference: some groups communicate more often than others.
    """
    for wait in cycle:
        channel, sequence = wait.collective.channel, wait.collective.sequence
        if channel.is_pair or channel.is_store or channel.operation or sequence < 3:
            continue
        calls = {
            rank: _since_meetings(records[rank], channel)
            for rank in channel.ranks
            if rank in records
        }
        meetings = {number for since in calls.values() for number in since}
        before = [{since.get(at) for since in calls.values()} for at in meetings if at < sequence]
        if any(len(made) > 1 for made in before) or not any(any(made) for made in before):
            continue
        now = {rank: since.get(sequence) or () for rank, since in calls.items()}
        entered = [rank for rank, record in records.items() if _has_entered(record, wait)]
        votes = Counter(now[rank] for rank in entered if rank in now).most_common(2)
        if votes[0][1] < 2 or (len(votes) > 1 and votes[0][1] == votes[1][1]):
            continue
        usual = votes[0][0]
        # Who is in a group of which the others have no sibling cannot do as they do.
        siblings = {
            (call.operation, len(call.channel.ranks))
            for rank in entered
            if now.get(rank) == usual
            for call in records[rank].collectives
        }
        uneven = {
            other.rank
            for other in cycle
            if other.rank in now
            and siblings.issuperset(now[other.rank])
            and now[other.rank]
            != (usual if other.rank in entered else usual[: len(now[other.rank])])
        }
        if len(uneven) == 1:
            return [*uneven], channel
    return [], None


def _has_entered(record: FlightRecord, wait: OpenCollective) -> bool:
    return record.last.get(wait.collective.channel, 0) >= wait.collective.sequence


def _since_meetings(
    record: FlightRecord, channel: CollectiveChannel
) -> dict[int, tuple[tuple[str, int], ...]]:
    """Return what RECORD calls before each collective of CHANNEL, since the one before.

    By its number: the operations, each with the size of its group.
    """
    made: dict[int, tuple[tuple[str, int], ...]] = {}
    current: list[tuple[str, int]] | None = None
    sequence = 0
    for call in record.collectives:
        if call.channel == channel:
            sequence = call.sequence
            if current is not None:
                made[sequence] = tuple(current)
            current = []
        elif current is not None and not call.channel.is_pair and not call.channel.is_store:
            current.append((call.operation, len(call.channel.ranks)))
    if current is not None:
        made[sequence + 1] = tuple(current)
    return made


def _departures(steps: Iterable[_Step]) -> list[_Step]:
    """Return the STEPS from a call to one that has never followed it, but another.

    Both must have come back before: what a script does first is no order yet, and a loop that
    begins again has not left it. Nor has a call that is repeated: it may end and begin the loop.
    What comes again later belongs to another order.
    """
    followers: dict[object, Counter[object]] = {}
    # How often each call has come, repetitions left out.
    visits: Counter[object] = Counter()
    departures = []
    for step in steps:
        before, after = ((call.channel, call.operation, call.site) for call in step)
        following = followers.setdefault(before, Counter())
        if not visits:
            visits[before] = 1
        has_order = any(visits[call] > 1 for call in following.keys() - {before})
        if has_order and visits[after] > 1 and after not in {*following, before}:
            departures.append((step, following, after))
        following[after] += 1
        visits[after] += after != before
    return [step for step, following, after in departures if following[after] == 1]


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
