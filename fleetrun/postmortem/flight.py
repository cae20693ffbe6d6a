"""Finds the ranks that keep others waiting, from the ranks' records of collectives; pure.

A rank in a collective that another rank has not entered waits for that rank. The cause is a rank
that is awaited and waits for nobody; else a cycle of ranks that wait for each other; else, if all
have entered, the network or a device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fleetrun.postmortem import desyncs
from fleetrun.postmortem.flightnames import (
    CYCLE,
    DESYNC,
    UNFINISHED,
    UNKNOWN,
    WAY,
    FlightFinding,
    JobRanks,
    RankState,
    at_site,
    describe_missing,
    named,
    since_when,
    who,
)
from fleetrun.postmortem.flightwaits import (
    OTHER,
    OpenCollective,
    awaited_alone,
    find_cycle,
    oldest,
    open_collectives,
    reopened,
    with_polls,
    without_early_ends,
)
from fleetrun.records.flightfile import (
    BACKWARD,
    BLOCKING,
    Collective,
    CollectiveChannel,
    FlightRecord,
)

# What stands for several collectives.
_SEVERAL = frozenset((BACKWARD, "program"))
# The most findings of one kind.
_MOST = 4


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
    findings = _of_ranks(records, job, has_failed=has_failed, until=until)
    forked = called_by_forks(records, job)
    # What a fork sends and receives is missing in the calls of its parent.
    others = {rank for finding in findings for rank in finding.ranks}
    is_first = any(others <= {*finding.ranks} for finding in forked)
    return (*forked, *findings) if is_first else (*findings, *forked)


def called_by_forks(
    records: Mapping[int, FlightRecord], job: JobRanks
) -> tuple[FlightFinding, ...]:
    """Return which ranks have forked processes that use the ranks' groups."""
    calls: dict[tuple[str, object], list[int]] = {}
    for rank, record in sorted(records.items()):
        if record.forked is not None:
            calls.setdefault((record.forked.operation, record.forked.site), []).append(rank)
    findings = []
    for ranks in calls.values():
        call = records[ranks[0]].forked
        assert call is not None
        whom = f"a process (pid {call.pid})" if len(ranks) == 1 else "processes"
        text = (
            f"{whom} that {who(ranks, job)} forked called {call.operation}{at_site(call)}: "
            "a fork cannot communicate in the groups of its parent"
        )
        findings.append(FlightFinding(DESYNC, tuple(ranks), text))
    return tuple(findings)


def _of_ranks(
    records: Mapping[int, FlightRecord], job: JobRanks, *, has_failed: bool, until: float
) -> tuple[FlightFinding, ...]:
    """Return why the ranks of RECORDS hang, as `verdict` does, by their own calls."""
    known = {rank: record for rank, record in records.items() if not record.has_failed}
    states = dict(job.states)
    for rank, record in known.items():
        if record.has_ended:
            states[rank] = states.get(rank, RankState())._replace(has_ended=True)
    job = job._replace(states=states)
    if has_failed:
        known = {rank: reopened(record) for rank, record in known.items()}
    opened = without_early_ends(known)
    waits = open_collectives(opened, until)
    if not has_failed:
        opened = with_polls(opened, waits)
        waits = open_collectives(opened, until)
    wrong = desyncs.find(known, job, waits=waits) or _beyond(waits, job)
    if wrong:
        return wrong
    known = opened
    awaited = awaited_alone(waits)
    culprits = [rank for rank in awaited if not may_wait(known[rank], job)]
    alone = _alone(culprits, waits, job)
    if alone:
        return alone
    if awaited:
        missing = tuple(describe_missing([rank], waits, job) for rank in culprits[:_MOST])
        return missing or (_unknown(awaited, waits, known, job),)
    outvoted = _outvoted(waits, job) or _lonely(waits, job)
    if outvoted:
        return outvoted
    cycle = find_cycle(waits)
    if cycle:
        return (_drawn(cycle, job),)
    return _unfinished(waits, known, job)


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
    known = without_early_ends(known)
    waiting: dict[int, tuple[Collective, tuple[int, ...]]] = {}
    for wait in sorted(open_collectives(known, until), key=lambda wait: wait.collective.issued_at):
        if wait.holds_up:
            waiting.setdefault(wait.rank, (wait.collective, wait.missing))
    return dict(sorted(waiting.items()))


def _beyond(waits: Sequence[OpenCollective], job: JobRanks) -> tuple[FlightFinding, ...]:
    """Return the ranks that wait in a group of ranks which the job does not have."""
    calls = [wait for wait in waits if max(wait.collective.channel.ranks, default=0) >= job.ranks]
    if not calls:
        return ()
    first = min((wait.collective for wait in calls), key=lambda call: call.issued_at)
    ranks = sorted({wait.rank for wait in calls if wait.collective.channel == first.channel})
    text = (
        f"{who(ranks, job)} called {named(first, job)}{at_site(first)}, but the job has only "
        f"{who(range(job.ranks), job)}"
    )
    return (FlightFinding(DESYNC, tuple(ranks), text),)


def _alone(
    culprits: Sequence[int],
    waits: Sequence[OpenCollective],
    job: JobRanks,
) -> tuple[FlightFinding, ...]:
    """Return the ranks in a collective without which most others have ended, all of CULPRITS."""
    if not culprits or not all(job.states.get(rank, RankState()).has_ended for rank in culprits):
        return ()
    # What runs on a device may be done, though nobody has looked since.
    first, waiting_ranks = oldest([wait for wait in waits if culprits[0] in wait.missing])
    if first.channel.is_pair or len(culprits) <= len(waiting_ranks):
        return ()
    text = (
        f"{who(waiting_ranks, job)} entered {named(first, job)}{at_site(first)}, without which "
        f"{who(culprits, job)} ended"
    )
    return (FlightFinding(DESYNC, tuple(waiting_ranks), text),)


def _outvoted(waits: Sequence[OpenCollective], job: JobRanks) -> tuple[FlightFinding, ...]:
    """Return the ranks that wait for all of a group while most of it waits elsewhere for them.

    Calls of two groups of the same ranks, backwards and new groups are not compared by position.
    """
    first: dict[tuple[int, ...], dict[int, OpenCollective]] = {}
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
                    describe_missing([rank], right, job, within=wait_of[rank].collective)
                    for rank in fewer[:_MOST]
                )
    return ()


def _lonely(waits: Sequence[OpenCollective], job: JobRanks) -> tuple[FlightFinding, ...]:
    """Return the rank that waits alone for all others of a group, which all wait for it elsewhere.

    They may wait for each other, but in the end for that rank; none if there are several such.
    """
    awaited: dict[int, set[int]] = {}
    for wait in waits:
        if wait.holds_up:
            awaited.setdefault(wait.rank, set()).update(wait.awaited)
    lonely = []
    for wait in waits:
        others = {*wait.missing}
        if len(others) < 2 or len(others) < len(wait.collective.channel.ranks) - 1:
            continue
        blocked, grown = {wait.rank}, True
        while grown:
            more = {rank for rank in others - blocked if awaited.get(rank, set()) & blocked}
            blocked |= more
            grown = bool(more)
        directly = [other for other in waits if wait.rank in other.awaited]
        is_pair = all(other.collective.channel.is_pair for other in directly)
        # A single message may be too many as well as missing.
        if others < blocked and (not is_pair or len({other.rank for other in directly}) > 1):
            lonely.append(wait)
    if len({wait.rank for wait in lonely}) != 1:
        return ()
    alone = min(lonely, key=lambda wait: wait.collective.issued_at)
    first, waiting_ranks = oldest([wait for wait in waits if alone.rank in wait.awaited])
    text = (
        f"{who([alone.rank], job)} waits alone in {named(alone.collective, job)}"
        f"{at_site(alone.collective)} since {since_when(alone.collective)}; all others there wait "
        f"for it, {who(waiting_ranks, job)} in {named(first, job)}{at_site(first)}"
    )
    return (FlightFinding(DESYNC, (alone.rank,), text),)


def _unknown(
    ranks: Sequence[int],
    waits: Sequence[OpenCollective],
    records: Mapping[int, FlightRecord],
    job: JobRanks,
) -> FlightFinding:
    """Describe the oldest collective that any of RANKS never entered; blame nobody."""
    awaiting = [wait for wait in waits if any(rank in wait.missing for rank in ranks)]
    first = min(awaiting, key=lambda wait: (wait.collective.issued_at, wait.rank))
    late = [rank for rank in sorted(ranks) if rank in first.missing]
    unrecorded = " and ".join(sorted({what for rank in late for what in records[rank].unrecorded}))
    reserve = f"may wait elsewhere, as collectives of {unrecorded} are not recorded, and "
    text = describe_missing(late, awaiting, job, reserve=reserve).text
    return FlightFinding(UNKNOWN, (), text)


def _drawn(cycle: Sequence[OpenCollective], job: JobRanks) -> FlightFinding:
    """Describe the ranks of CYCLE, which wait for each other."""
    ranks = [wait.rank for wait in cycle]
    circle = " → ".join(str(rank) for rank in (*ranks, ranks[0]))
    parts = []
    for wait, awaited in zip(cycle, [*ranks[1:], ranks[0]], strict=True):
        call = wait.collective
        if call.channel.is_pair:
            where = f"{call.operation} {call.sequence} {WAY[call.channel.operation]} rank {awaited}"
        else:
            where = named(call, job)
        parts.append(f"{who([wait.rank], job)} in {where}{at_site(call)}")
    text = f"ranks wait for each other in a circle, {circle}: {'; '.join(parts)}"
    calls = [wait.collective for wait in cycle]
    if all((call.channel.operation, call.state) == ("send", BLOCKING) for call in calls):
        text += "; there, a send waits for its recv, so some of them must receive first"
    return FlightFinding(CYCLE, tuple(sorted(set(ranks))), text)


def _unfinished(
    waits: Sequence[OpenCollective], records: Mapping[int, FlightRecord], job: JobRanks
) -> tuple[FlightFinding, ...]:
    """Describe a wait for a store; else the oldest collective that none of its ranks finishes."""
    keyless = [wait for wait in waits if wait.collective.channel.is_store]
    if keyless:
        return (_keyless(keyless, waits, job),)
    entered = [wait for wait in waits if not wait.missing and _all_known(wait, records)]
    if not entered:
        return ()
    first, waiting_ranks = oldest([wait for wait in entered if wait.holds_up] or entered)
    verb = "waits" if len(waiting_ranks) == 1 else "wait"
    entered_it = f"all its ranks have entered {named(first, job)}"
    reason = "no rank is missing, so the network or a device holds it up"
    if all(job.states.get(rank, RankState()).has_ended for rank in waiting_ranks):
        their = "its" if len(waiting_ranks) == 1 else "their"
        text = (
            f"{entered_it}{at_site(first)}, and {who(waiting_ranks, job)} ended {their} script "
            "before it was done: no rank is missing, so the network, a device or what runs while "
            "Python ends holds it up"
        )
        return (FlightFinding(UNFINISHED, (), text),)
    if first.operation.partition(" ")[0] in _SEVERAL:
        reason = (
            "no rank is missing, but its collectives, which are not recorded one by one, may differ"
        )
    places = _places(first, records)
    if first.state == BLOCKING and len(places) > 1:
        calls = ", ".join(f"call {place} of {who(places[place], job)}" for place in places)
        reason = (
            "Paddle pairs the calls of a gloo group by their number, sends and recvs included, "
            f"and it is {calls}; a group of its own for each pair of ranks avoids that"
        )
    text = (
        f"{entered_it}, and {who(waiting_ranks, job)} {verb} there{at_site(first)} since "
        f"{since_when(first)}: {reason}"
    )
    return (FlightFinding(UNFINISHED, (), text),)


def _keyless(
    stores: Sequence[OpenCollective], waits: Sequence[OpenCollective], job: JobRanks
) -> FlightFinding:
    """Describe the waits for keys in STORES, which any rank may have to write."""
    call = min((wait.collective for wait in stores), key=lambda call: call.issued_at)
    ranks = sorted({wait.rank for wait in stores})
    verb = "waits" if len(ranks) == 1 else "wait"
    text = (
        f"{who(ranks, job)} {verb} in {call.operation}{at_site(call)} since {since_when(call)}, "
        "for what no rank writes there"
    )
    for_them = [wait for wait in waits if any(rank in wait.missing for rank in ranks)]
    if for_them:
        first, waiting_ranks = oldest(for_them)
        verb = "waits" if len(waiting_ranks) == 1 else "wait"
        them = "it" if len(ranks) == 1 else "them"
        text += (
            f"; {who(waiting_ranks, job)} {verb} for {them} in {named(first, job)}{at_site(first)}"
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
    return same_group and channel.operation in {"", *OTHER}


def _all_known(wait: OpenCollective, records: Mapping[int, FlightRecord]) -> bool:
    channel = wait.collective.channel
    pair = (channel.source, channel.target)
    return all(rank in records for rank in (pair if channel.is_pair else channel.ranks))


def table(records: Iterable[FlightRecord], most: int) -> list[tuple[FlightRecord, Collective]]:
    """Return the newest collectives of all RECORDS, at most MOST of each, in order of issue."""
    rows = [(record, collective) for record in records for collective in record.collectives[-most:]]
    return sorted(rows, key=lambda row: (row[1].issued_at, row[0].rank))
