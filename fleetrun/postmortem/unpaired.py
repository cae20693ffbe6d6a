"""Finds the rank whose sends and recvs do not fit those of its peers; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fleetrun.postmortem.flightnames import WAY, JobRanks, RankState, at_site, named, who

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from fleetrun.postmortem.flightwaits import OpenCollective
    from fleetrun.records.flightfile import Collective, CollectiveChannel, FlightRecord

# The least ranks that show together which peer is usual.
_LEAST = 3


class _Unequal(NamedTuple):
    """Two ranks of which one has made more messages to the other than that has."""

    # With an empty operation.
    channel: CollectiveChannel
    sends: int
    recvs: int

    @property
    def fewer(self) -> int:
        """The rank that has made fewer."""
        return self.channel.source if self.sends < self.recvs else self.channel.target


def find(
    waits: Sequence[OpenCollective],
    records: Mapping[int, FlightRecord],
    job: JobRanks,
    among: AbstractSet[int],
) -> tuple[int, str] | None:
    """Return the one rank AMONG those whose messages do not fit its peers', and how.

    WAITS are open calls; RECORDS are those of all ranks.
    """
    return _uncounted(waits, records, job, among) or _astray(records, job, among)


def _uncounted(
    waits: Sequence[OpenCollective],
    records: Mapping[int, FlightRecord],
    job: JobRanks,
    among: AbstractSet[int],
) -> tuple[int, str] | None:
    """Return the rank that has made fewer, or more, sends and recvs than all its peers.

    They are counted until a call of all in which some of them wait, or until the script's end.
    """
    meetings: list[Collective | None] = [
        wait.collective
        for wait in sorted(waits, key=lambda wait: wait.collective.issued_at)
        if not wait.collective.channel.is_pair and not wait.collective.channel.is_store
    ]
    for meeting in (*meetings, None):
        unequal = [*_unequal(meeting, records, job)]
        common = set.intersection(*({u.channel.source, u.channel.target} for u in unequal), among)
        if len(common) != 1:
            continue
        (rank,) = common
        # Messages that are under way at the meeting lack a recv only.
        is_both_ways = len({pair.channel.source == rank for pair in unequal}) > 1
        if is_both_ways and len({pair.fewer == rank for pair in unequal}) == 1:
            parts = [_counted(pair, rank, job) for pair in unequal]
            than = "fewer" if unequal[0].fewer == rank else "more"
            before = "the end" if meeting is None else named(meeting, job)
            return rank, (
                f"{who([rank], job)} has made {than} sends and recvs than its peers before "
                f"{before}: {', '.join(parts)}"
            )
    return None


def _counted(pair: _Unequal, rank: int, job: JobRanks) -> str:
    source, target = pair.channel.source, pair.channel.target
    if source == rank:
        return f"{pair.sends} to {who([target], job)}, which made {pair.recvs} recvs"
    return f"{pair.recvs} from {who([source], job)}, which made {pair.sends} sends"


def _unequal(
    meeting: Collective | None, records: Mapping[int, FlightRecord], job: JobRanks
) -> Iterator[_Unequal]:
    """Yield the pairs of ranks whose sends and recvs before MEETING differ, and will not be equal.

    A rank that has not reached it may still make what it lacks. None: the end of the script.
    """
    there = {
        rank
        for rank, record in records.items()
        if (
            job.states.get(rank, RankState()).has_ended
            if meeting is None
            else record.last.get(meeting.channel, 0) >= meeting.sequence
        )
    }
    members = records if meeting is None else meeting.channel.ranks
    counted = {
        rank: _made(records[rank], meeting if rank in there else None)
        for rank in members
        if rank in records
    }
    made = {rank: counts for rank, counts in counted.items() if counts is not None}
    pairs = {channel._replace(operation="") for counts in made.values() for channel in counts}
    for channel in sorted(pairs):
        if not {channel.source, channel.target} <= made.keys():
            continue
        pair = _Unequal(
            channel,
            made[channel.source].get(channel._replace(operation="send"), 0),
            made[channel.target].get(channel._replace(operation="recv"), 0),
        )
        if pair.sends != pair.recvs and pair.fewer in there:
            yield pair


def _made(record: FlightRecord, meeting: Collective | None) -> dict[CollectiveChannel, int] | None:
    """Return how many sends and recvs of each pair RECORD has before MEETING, if that is given.

    None: its ring has dropped the meeting.
    """
    made = {channel: number for channel, number in record.last.items() if channel.is_pair}
    if meeting is None:
        return made
    for call in reversed(record.collectives):
        if (call.channel, call.sequence) == (meeting.channel, meeting.sequence):
            return made
        if call.channel.is_pair:
            made[call.channel] = call.sequence - 1
    return None


def _astray(
    records: Mapping[int, FlightRecord], job: JobRanks, among: AbstractSet[int]
) -> tuple[int, str] | None:
    """Return the rank that calls another peer than it did before, where no other rank does.

    A peer counts by its distance, by its number, or by the bits in which it differs.
    """
    lines: dict[tuple[object, ...], list[tuple[int, Collective]]] = {}
    for rank, record in sorted(records.items()):
        for call in record.collectives:
            ends = {call.channel.source, call.channel.target}
            if call.site is not None and ends <= {*call.channel.ranks}:
                lines.setdefault((call.operation, call.site), []).append((rank, call))
    strayed: dict[int, Collective] = {}
    for calls in lines.values():
        if len({rank for rank, _ in calls}) >= _LEAST:
            for form in zip(*(_forms(rank, call) for rank, call in calls), strict=True):
                stray = _first_other(calls, form)
                if stray is not None:
                    strayed.setdefault(*stray)
    if len(strayed) != 1 or not strayed.keys() <= among:
        return None
    ((rank, call),) = strayed.items()
    channel = call.channel
    peer = channel.source if channel.target == rank else channel.target
    return rank, (
        f"{who([rank], job)} called {call.operation} {WAY[call.operation]} rank {peer}"
        f"{at_site(call)}, where it called another peer before, as all other ranks do"
    )


def _forms(rank: int, call: Collective) -> tuple[int, int, int]:
    channel = call.channel
    own, peer = (
        channel.ranks.index(member)
        for member in (rank, channel.source if channel.target == rank else channel.target)
    )
    return (peer - own) % len(channel.ranks), peer, own ^ peer


def _first_other(
    calls: Sequence[tuple[int, Collective]], form: Sequence[int]
) -> tuple[int, Collective] | None:
    """Return the rank that alone has another value of FORM after the usual one, and that call."""
    values_of: dict[int, list[int]] = {}
    for (rank, _), value in zip(calls, form, strict=True):
        values_of.setdefault(rank, []).append(value)
    mixed = [rank for rank, values in values_of.items() if len({*values}) > 1]
    usual = {values[0] for values in values_of.values()}
    if len(mixed) != 1 or len(usual) != 1:
        return None
    return next(
        (rank, call)
        for (rank, call), value in zip(calls, form, strict=True)
        if rank == mixed[0] and value not in usual
    )
