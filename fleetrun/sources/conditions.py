"""Finds the ranks that are slower than the others, and why, from what their hosts measure; pure.

A rank that spends less time in collectives than the others keeps them waiting. The cause is what
holds it back more than the others: its processors, GPU or link, or else its data or its own work.
Without records of collectives, a rank is named if something holds it back.
"""

from __future__ import annotations

from functools import reduce
from operator import and_

from fleetrun.conversion import numbers, ranges, size
from fleetrun.doctor.gpus import THROTTLES
from fleetrun.records import names
from fleetrun.session.exchange import (
    LONGEST_LIST,
    GpuConditions,
    HostConditions,
    LinkConditions,
    RankConditions,
)
from fleetrun.typehints import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from fleetrun.model import LaunchPlan
    from fleetrun.records.metricsfile import GpuUsage, MetricsRecord, RankUse

# A rank is held back if its share of time exceeds the others' by this much and by this factor.
_SHARE, _TIMES = 0.15, 1.5
# A rank is late if its share of time in collectives is this much smaller than the others'. For one
# that is held back, half of it will do: a backward of Paddle's own reducer counts as a collective.
_LATE = 0.15
# The share of its lateness that what its other threads compute must explain.
_MOSTLY = 0.6
# Bytes a second; a rank that reads or writes more waits for a disk rather than for a lock.
_MOVES = 1 << 20
# Pages of memory a second; a rank that waits for more of them from a disk, and for more than the
# others by the factor above, waits for nothing else.
_FAULTS = 100
# A rank computes longer if it runs for this share of the time more than the others.
_LONGER = 0.05
# A bad link is this many times as slow as the others; its round trip is longer by at least this.
_LINK_TIMES, _RTT_S = 3.0, 0.002
# The least share of segments that are lost on a bad link.
_LOSS = 0.01
# Fewer bytes or segments say nothing about a link.
_LEAST_BYTES, _LEAST_SEGMENTS = 1 << 20, 100
# The clock of a GPU that is slowed down, as a share of the others'.
_CLOCK = 0.9


# What holds a rank back, the most certain first: waiting for a processor may be due to a limit.
_HOLDS: Mapping[str, Callable[[RankConditions], float]] = {
    "throttled": lambda rank: rank.throttled,
    "queued": lambda rank: rank.queued,
    "stolen": lambda rank: rank.stolen,
}


# What a rank does with its time beside collectives; `threads` at the same time.
_PARTS: Mapping[str, Callable[[RankConditions], float]] = {
    "running": lambda rank: rank.running,
    "threads": lambda rank: rank.threads,
    # In a collective, it may run or wait for a processor, too.
    "elsewhere": lambda rank: max(0.0, 1.0 - rank.running - rank.queued - rank.collectives),
}


class Slowness(NamedTuple):
    """Slow ranks, as places among all ranks, and why: a sentence without its full stop."""

    ranks: tuple[int, ...]
    # queued, throttled, stolen, gpu, link, threads, paging, data or work.
    cause: str
    text: str


# A host --------------------------------------------------------------------------------------


def measured(
    records: Sequence[MetricsRecord], plan: LaunchPlan, node_of: Callable[[str], int | None]
) -> HostConditions | None:
    """Return the conditions on one host between the first and the last of RECORDS.

    None if the two are about different ranks. NODE_OF returns the host with a given address.
    """
    first, last = records[0], records[-1]
    seconds = last.monotonic - first.monotonic
    before = {use.pid: use for use in first.ranks}
    if seconds <= 0 or before.keys() != {use.pid for use in last.ranks}:
        return None
    places = {
        process.name: plan.ranks.index(process.rank)
        for process in plan.processes
        if process.rank is not None and process.rank.is_trainer
    }

    def share(now: float | None, past: float | None) -> float:
        return -1.0 if now is None or past is None else max(0.0, now - past) / seconds

    ranks = tuple(
        RankConditions(
            process=places[use.process],
            queued=share(use.queued_s, past.queued_s),
            running=share(use.main_s, past.main_s),
            threads=share(_threads_s(use), _threads_s(past)),
            collectives=share(use.collectives_s, past.collectives_s),
            throttled=share(use.throttled_s, past.throttled_s),
            stolen=share(use.stolen_s, past.stolen_s),
            read_bytes_per_s=share(use.read_bytes, past.read_bytes),
            written_bytes_per_s=share(use.written_bytes, past.written_bytes),
            faults_per_s=share(use.major_faults, past.major_faults),
            processors=use.processors[:LONGEST_LIST],
        )
        for use in last.ranks
        for past in [before[use.pid]]
        if use.process in places
    )
    own = {spec.rank: place for place, spec in enumerate(plan.ranks) if spec.is_trainer}
    gpus = tuple(
        _gpu(gpu, [use for record in records for use in record.gpus if use.uuid == gpu.uuid], own)
        for gpu in last.gpus
        if gpu.ranks
    )
    return HostConditions(plan.generation, ranks, gpus, tuple(_links(records, node_of)))


def _threads_s(use: RankUse) -> float | None:
    """Return how long the threads of USE have run beside the main thread."""
    if use.process_s is None or use.main_s is None:
        return None
    return use.process_s - use.main_s


def _gpu(now: GpuUsage, looks: Sequence[GpuUsage], places: Mapping[int, int]) -> GpuConditions:
    throttle = now.throttle or 0
    for look in looks:
        throttle &= look.throttle or 0
    clocks = [look.clock_mhz for look in looks if look.clock_mhz is not None]
    strangers = set(now.strangers).intersection(*(look.strangers for look in looks))
    return GpuConditions(
        number=now.number,
        processes=tuple(places[rank] for rank in now.ranks if rank in places),
        throttle=throttle,
        temperature_c=-1.0 if now.temperature_c is None else now.temperature_c,
        clock_mhz=max(clocks, default=-1),
        ecc_errors=(now.ecc_errors or 0) - (looks[0].ecc_errors or 0),
        strangers=tuple(sorted(strangers)),
    )


def _links(
    records: Sequence[MetricsRecord], node_of: Callable[[str], int | None]
) -> Iterator[LinkConditions]:
    before = {link.peer: link for link in records[0].links}
    for link in records[-1].links:
        node, past = node_of(link.peer), before.get(link.peer)
        if node is None or past is None:
            continue
        same = [use for record in records[1:] for use in record.links if use.peer == link.peer]
        trips = [use.rtt_s for use in same if use.rtt_s is not None]
        acked, busy_s = link.acked_bytes - past.acked_bytes, link.busy_s - past.busy_s
        segments = link.segments - past.segments
        yield LinkConditions(
            node=node,
            rtt_s=min(trips, default=-1.0),
            bytes_per_s=acked / busy_s if acked >= _LEAST_BYTES and busy_s > 0 else -1.0,
            resent=max(0, link.resent - past.resent) / segments
            if segments >= _LEAST_SEGMENTS
            else -1.0,
        )


# All hosts -----------------------------------------------------------------------------------


def compare(hosts: Mapping[int, HostConditions], plan: LaunchPlan) -> tuple[Slowness, ...]:
    """Return which ranks of the job of PLAN are slower than the others, and why."""
    ranks = {rank.process: rank for host in hosts.values() for rank in host.ranks}
    if len(ranks) < 2:
        return ()
    late = _late(ranks)
    reasons = _reasons(ranks, late or {})
    causes = [
        *_of_processors(hosts, ranks, reasons, plan),
        *_of_gpus(hosts, plan),
        *_of_links(hosts, plan),
    ]
    if late is not None:
        known = {rank for cause in causes for rank in cause.ranks}
        own = sorted(rank for rank in late.keys() - known if late[rank] >= _LATE)
        usual = _others({place: rank.running for place, rank in ranks.items()})
        causes += [
            _own_work(ranks[place], reasons.get(place, ""), usual[place], hosts, plan)
            for place in own
        ]
        causes = [_with_waits(cause, late) for cause in causes if _matters(cause, late)]
    # A cause of all ranks makes none of them slower than the others.
    return tuple(cause for cause in causes if len(cause.ranks) < len(ranks))


def _matters(cause: Slowness, late: Mapping[int, float]) -> bool:
    """Whether others wait because of CAUSE; for a link, both ends do."""
    return cause.cause == "link" or bool(late.keys() & set(cause.ranks))


def _with_waits(cause: Slowness, late: Mapping[int, float]) -> Slowness:
    shares = [late[rank] for rank in cause.ranks if rank in late]
    if not shares:
        return cause
    more = f"{max(shares):.0%} more of the time"
    return cause._replace(text=f"{cause.text}; others wait in collectives for {more}")


def _late(ranks: Mapping[int, RankConditions]) -> dict[int, float] | None:
    """Return the ranks that others wait for, with how much less they wait; None if unknown."""
    shares = {place: rank.collectives for place, rank in ranks.items()}
    if min(shares.values()) < 0:
        return None
    others = _others(shares, upper=True)
    return {
        place: others[place] - share
        for place, share in shares.items()
        if others[place] - share >= _LATE / 2
    }


def _others(values: Mapping[int, float], *, upper: bool = False) -> dict[int, float]:
    """Return for each place the lower (or UPPER) median of the other VALUES, of two or more.

    Sorted once: for each of thousands of ranks by itself it would hold up the launcher.

    >>> _others({0: 5.0, 1: 1.0, 2: 3.0, 3: 2.0})
    {0: 2.0, 1: 3.0, 2: 2.0, 3: 3.0}
    """
    ordered = sorted(values.values())
    middle = (len(ordered) - 2 + upper) // 2
    # Without a value up to the middle, the next one takes its place.
    return {place: ordered[middle + (value <= ordered[middle])] for place, value in values.items()}


def _label(places: Iterable[int], plan: LaunchPlan) -> str:
    return names.listed([names.spec_label(plan.ranks[place]) for place in places])


def _of_processors(
    hosts: Mapping[int, HostConditions],
    ranks: Mapping[int, RankConditions],
    reasons: Mapping[int, str],
    plan: LaunchPlan,
) -> Iterator[Slowness]:
    """Yield the ranks that do not get their processors as much as the others do."""
    shares = {
        cause: {place: min(1.0, max(0.0, share(rank))) for place, rank in ranks.items()}
        for cause, share in _HOLDS.items()
    }
    others = {cause: _others(shares[cause]) for cause in shares}
    for place, reason in reasons.items():
        if reason != "queued":
            shares["queued"][place] = 0.0
    for host in hosts.values():
        # Ranks on the same processors with the same cause are reported together.
        groups: dict[tuple[str, str], list[int]] = {}
        for rank in host.ranks:
            place = rank.process
            held = (
                hold for hold in shares if _stands_out(shares[hold][place], others[hold][place])
            )
            cause = next(held, "")
            if cause:
                groups.setdefault((cause, rank.processors), []).append(place)
        for (cause, processors), places in groups.items():
            who = _label(places, plan)
            is_one = len(places) == 1
            time = f"{sum(shares[cause][place] for place in places) / len(places):.0%} of the time"
            if cause == "throttled":
                text = f"the limits of {'its' if is_one else 'their'} control group hold {who} back"
                text += f" {time} (`cpu.max`, or the container's --cpus)"
            elif cause == "stolen":
                text = f"the hypervisor gives the processors of {who} to others {time}"
            else:
                text = f"{who} {'waits' if is_one else 'wait'} {time} for "
                text += _contended(processors, places, host, plan)
                text += _moved(ranks[places[0]]) if is_one else ""
            yield Slowness(tuple(places), cause, text)


def _reasons(ranks: Mapping[int, RankConditions], late: Mapping[int, float]) -> dict[int, str]:
    """Return what each rank does longer than the others: paging, threads, queued, work or data.

    One that has more to compute waits for a processor as long as the others do for each second on
    one, and one that waits for a disk, or for Python's lock, as often as it goes on.
    """
    if any(rank.running < 0 or rank.queued < 0 for rank in ranks.values()):
        return {}
    more = {
        name: _more({place: share(rank) for place, rank in ranks.items()})
        for name, share in _PARTS.items()
    }
    if any(rank.collectives < 0 for rank in ranks.values()):
        more["elsewhere"] = dict.fromkeys(ranks, 0.0)
    faults = _others({place: rank.faults_per_s for place, rank in ranks.items()})
    crowding = _others(
        {place: rank.queued / max(rank.running, 0.01) for place, rank in ranks.items()}
    )
    reasons = {}
    for place, rank in ranks.items():
        # On a host that is full many times over, the least difference would explain all the rest.
        longer = more["running"][place] if more["running"][place] >= _LONGER else 0.0
        usual = rank.running - more["running"][place]
        parts = {
            "queued": rank.queued - (usual + longer) * crowding[place],
            "work": longer * (1 + crowding[place]),
            "data": more["elsewhere"][place],
        }
        threads = more["threads"][place] if rank.threads >= 0 else 0.0
        # The kernel waits for the disk as if for a processor, or computes to fetch the page.
        if place in late and rank.faults_per_s >= max(_FAULTS, _TIMES * faults[place]):
            reasons[place] = "paging"
        elif place in late and threads > _MOSTLY * late[place] >= more["running"][place]:
            reasons[place] = "threads"
        else:
            reasons[place] = max(parts, key=parts.__getitem__)
    return reasons


def _more(shares: Mapping[int, float]) -> dict[int, float]:
    """Return for each place how much more its share is than the median of the others'."""
    others = _others(shares)
    return {place: share - others[place] for place, share in shares.items()}


def _stands_out(share: float, others: float) -> bool:
    return share >= max(others + _SHARE, others * _TIMES)


def _contended(
    processors: str, places: Sequence[int], host: HostConditions, plan: LaunchPlan
) -> str:
    """Return PROCESSORS as text, with who else uses them."""
    own = set(numbers(processors))
    which = f"processor{'s' * (len(own) > 1)} {ranges(own, ',')}" if own else "a processor"
    sharing = [rank.process for rank in host.ranks if own & set(numbers(rank.processors))]
    others = [place for place in sharing if place not in places]
    if len(sharing) <= len(own) or not own:
        return f"{which}, which other processes use, too"
    if others:
        return (
            f"{which}, which {_label(others, plan)} may use, too (--bind=cores gives each its own)"
        )
    return f"{which}, to which all of them are bound (--bind=cores gives each its own)"


def _of_gpus(hosts: Mapping[int, HostConditions], plan: LaunchPlan) -> Iterator[Slowness]:
    """Yield the ranks whose GPUs are slower than the others'."""
    gpus = [gpu for host in hosts.values() for gpu in host.gpus if gpu.processes]
    # Bits that all have, or a GPU without others.
    common = reduce(and_, (gpu.throttle for gpu in gpus), -1)
    clocks = {place: gpu.clock_mhz for place, gpu in enumerate(gpus) if gpu.clock_mhz > 0}
    usual = _others(clocks) if len(clocks) > 1 else {}
    for place, gpu in enumerate(gpus):
        slow = [text for bit, text in THROTTLES.items() if gpu.throttle & ~common & bit]
        parts = [f"is slowed down: {', '.join(slow)}"] if slow else []
        if place in usual and gpu.clock_mhz < usual[place] * _CLOCK:
            parts.append(f"runs at {gpu.clock_mhz} MHz, the others at {usual[place]}")
        if parts and gpu.temperature_c > 0:
            parts[-1] += f" ({gpu.temperature_c:.0f} °C)"
        if gpu.strangers:
            pids = ranges(gpu.strangers)
            parts.append(f"is used by another program, too (pid {pids})")
        if gpu.ecc_errors > 0:
            parts.append(f"has had {gpu.ecc_errors} uncorrected ECC errors just now")
        if parts:
            who = _label(gpu.processes, plan)
            text = f"GPU {gpu.number} of {who} {' and '.join(parts)}"
            yield Slowness(gpu.processes, "gpu", text)


def _of_links(hosts: Mapping[int, HostConditions], plan: LaunchPlan) -> Iterator[Slowness]:
    """Yield the hosts whose best link is worse than that of the others."""
    pairs: dict[frozenset[int], list[LinkConditions]] = {}
    for node, host in hosts.items():
        for link in host.links:
            pairs.setdefault(frozenset((node, link.node)), []).append(link)
    if len({node for pair in pairs for node in pair}) < 3:
        yield from _of_only_link(hosts, pairs, plan)
        return

    trips = _best(pairs, lambda link: link.rtt_s)
    # In seconds a byte, so that less is better, as above.
    speeds = _best(pairs, lambda link: 1 / link.bytes_per_s if link.bytes_per_s > 0 else -1.0)
    losses = _best(pairs, lambda link: link.resent)
    parts: dict[int, list[str]] = {}
    for node, usual in _worse(trips, _RTT_S).items():
        text = f"round trips take {trips[node] * 1e3:.1f} ms, elsewhere {usual * 1e3:.1f}"
        parts.setdefault(node, []).append(text)
    for node, usual in _worse(speeds, 0.0).items():
        text = f"it carries {size(1 / speeds[node])} a second, others {size(1 / usual)}"
        parts.setdefault(node, []).append(text)
    for node in _worse(losses, _LOSS):
        parts.setdefault(node, []).append(f"{losses[node]:.1%} of the segments are lost")
    for node in sorted(parts):
        places = [place for place, spec in enumerate(plan.ranks) if spec.node_rank == node]
        if places:
            text = f"the link of {plan.nodes[node]} ({_label(places, plan)}) is slow"
            yield Slowness(tuple(places), "link", f"{text}: {', '.join(parts[node])}")


def _best(
    pairs: Mapping[frozenset[int], Sequence[LinkConditions]],
    value: Callable[[LinkConditions], float],
) -> dict[int, float]:
    """Return the least VALUE of each host's links, which are as bad as their worse direction."""
    least: dict[int, float] = {}
    for pair, links in pairs.items():
        worse = max(map(value, links))
        for node in pair if worse >= 0 else ():
            least[node] = min(worse, least.get(node, worse))
    return least


def _worse(values: Mapping[int, float], least: float) -> dict[int, float]:
    """Return the nodes whose VALUES are much worse than the others', each with the others'."""
    if len(values) < 3:
        return {}
    return {
        node: usual
        for node, usual in _others(values).items()
        if values[node] >= max(usual * _LINK_TIMES, usual + least) and values[node] > 0
    }


def _of_only_link(
    hosts: Mapping[int, HostConditions],
    pairs: Mapping[frozenset[int], Sequence[LinkConditions]],
    plan: LaunchPlan,
) -> Iterator[Slowness]:
    """Yield the link between two hosts if it loses segments; which end is at fault is unknown."""
    for pair, links in pairs.items():
        loss = max(link.resent for link in links)
        if loss >= _LOSS and hosts:
            ends = " and ".join(plan.nodes[node] for node in sorted(pair))
            text = f"the link between {ends} is bad: {loss:.1%} of the segments are lost"
            yield Slowness((), "link", text)


def _moved(rank: RankConditions) -> str:
    """Return what RANK writes to a disk or else reads from one; empty: little."""
    if rank.written_bytes_per_s >= _MOVES:
        return f"; it writes {size(rank.written_bytes_per_s)} a second to a disk"
    if rank.read_bytes_per_s >= _MOVES:
        return f"; it reads {size(rank.read_bytes_per_s)} a second from a disk"
    return ""


def _own_work(
    rank: RankConditions,
    reason: str,
    usual: float,
    hosts: Mapping[int, HostConditions],
    plan: LaunchPlan,
) -> Slowness:
    """Return what keeps RANK busy, by REASON, although nothing holds it back.

    The others run for the USUAL share of the time.
    """
    place, who = rank.process, _label((rank.process,), plan)
    waits = f"{who} waits {_PARTS['elsewhere'](rank):.0%} of the time"
    match reason:
        case "threads":
            text = (
                f"other threads of {who} compute {rank.threads:.0%} of the time while it waits: "
                "they hold Python's lock (GIL) or prepare its data (`fleetrun stacks`)"
            )
        case "paging":
            text = (
                f"{who} waits for pages of its memory, {rank.faults_per_s:.0f} of which a second "
                "come from a disk: swap, or mapped files that do not fit into memory (`free -m`, "
                "and the limit of its control group)"
            )
        case "queued":
            host = hosts[plan.ranks[place].node_rank]
            text = f"{who} waits {rank.queued:.0%} of the time for "
            text += _contended(rank.processors, (place,), host, plan) + _moved(rank)
        case "work":
            text = f"{who} computes longer ({rank.running:.0%} of the time on a processor, others "
            text += f"{usual:.0%})"
        case "data" if rank.written_bytes_per_s >= _MOVES:
            text = f"{waits}{_moved(rank)}"
        case "data" if rank.read_bytes_per_s >= _MOVES:
            text = f"{waits} for its data{_moved(rank)}"
        case "data":
            text = (
                f"{waits}, neither on a processor nor in a collective: for its data, a disk or a "
                "lock (`fleetrun stacks`)"
            )
        case _:
            reason, text = "work", f"{who} is slow"
    return Slowness((place,), reason, text)
