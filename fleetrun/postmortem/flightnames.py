"""Names ranks, groups and collectives in what is found in the ranks' records; pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetrun.conversion import ranges
from fleetrun.postmortem.flightwaits import OTHER, OpenCollective, oldest
from fleetrun.records.flightfile import NEW_GROUP, Collective, CollectiveChannel, ForkedCall
from fleetrun.records.rankfile import RankAxes

DESYNC, MISSING, CYCLE, UNFINISHED = "desync", "missing", "cycle", "unfinished"
# A rank is awaited that may itself wait for others, in collectives that are not recorded.
UNKNOWN = "unknown"
WAY = {"send": "to", "recv": "from"}


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


def describe_missing(
    ranks: Sequence[int],
    waits: Sequence[OpenCollective],
    job: JobRanks,
    *,
    within: Collective | None = None,
    reserve: str = "",
) -> FlightFinding:
    """Describe the collective that RANKS never entered, and the ranks that wait there.

    They wait themselves WITHIN another one, if that is given. RESERVE is said of them first.
    """
    first, waiting_ranks = oldest([wait for wait in waits if ranks[0] in wait.missing])
    channel = first.channel
    if channel.is_pair:
        opposite = OTHER[channel.operation]
        action = f"made {opposite} {first.sequence} {WAY[opposite]} {who(waiting_ranks[:1], job)}"
        waiter = f", which waits in {channel.operation}{at_site(first)} since {since_when(first)}"
    else:
        action = f"entered {named(first, job)}"
        waiting = (
            f"{who(waiting_ranks, job)} waits"
            if len(waiting_ranks) == 1
            else f"{len(waiting_ranks)} others wait"
        )
        waiter = f"; {waiting} there{at_site(first)} since {since_when(first)}"
    text = f"{who(ranks, job)} {reserve}never {action}{waiter}"
    # The one that waits would be meant.
    it = "it" if len(waiting_ranks) > 1 else f"rank {ranks[0]}"
    if within is not None:
        text = f"{text}; {it} waits in {named(within, job)}{at_site(within)}"
        return FlightFinding(DESYNC, tuple(ranks), text)
    state = job.states.get(ranks[0], RankState()) if len(ranks) == 1 else RankState()
    if state.has_ended:
        text = f"{text}; {it} has ended"
    elif state.place:
        text = f"{text}; {it} stands in {state.place}"
    return FlightFinding(MISSING, tuple(ranks), text)


def described(call: Collective) -> str:
    """Describe what CALL calls, and where."""
    root = f" (root {call.root})" if call.root >= 0 else ""
    tensor = f" of {call.tensor}" if call.tensor else ""
    return f"{call.operation}{tensor}{root}{at_site(call)}"


def named(call: Collective, job: JobRanks) -> str:
    """Name CALL by its number in its group."""
    return f"{call.operation} {call.number} {of(call.channel, job)}"


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


def who(ranks: Sequence[int], job: JobRanks) -> str:
    """Name RANKS; a single one with its place on the axes."""
    place = job.axes.place(ranks[0]) if job.axes is not None and len(ranks) == 1 else ""
    where = f" ({place})" if place else ""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}{where}"


def at_site(call: Collective | ForkedCall) -> str:
    """Return the line of the script that has made CALL, if that is known."""
    if call.site is None:
        return ""
    file, line, _ = call.site
    return f" in {file.rpartition('/')[2]}:{line}"


def since_when(call: Collective) -> str:
    """Return the time of day at which CALL was issued."""
    return time.strftime("%H:%M:%S", time.localtime(call.issued_at))
