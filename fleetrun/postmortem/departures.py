"""Finds the rank of a cycle that has left the order of its earlier calls; pure."""

from __future__ import annotations

import itertools
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
