"""Which ranks are slower than the others and why, from what their hosts measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plans
import pytest
from metricsrecords import a_record

from fleetrun.records.metricsfile import GpuUsage, LinkUse, MetricsRecord
from fleetrun.session.codec import Malformed
from fleetrun.session.driver import CODEC
from fleetrun.session.exchange import (
    GpuConditions,
    HostConditions,
    LinkConditions,
    RankConditions,
)
from fleetrun.sources import conditions

if TYPE_CHECKING:
    from fleetrun.model import LaunchPlan

PLAN = plans.plan(per_node=4)


def rank(place: int, **changes: object) -> RankConditions:
    usual = RankConditions(place, 0.05, 0.5, 0.02, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, f"{place}")
    return usual._replace(**changes)  # type: ignore[arg-type]


def host(*odd: RankConditions, gpus: tuple[GpuConditions, ...] = ()) -> HostConditions:
    """Return a host of four ranks; ODD gives the conditions of some."""
    ranks = {place: rank(place) for place in range(4)} | {use.process: use for use in odd}
    return HostConditions(0, tuple(ranks.values()), gpus, ())


def told(host: HostConditions, plan: LaunchPlan = PLAN) -> list[tuple[tuple[int, ...], str, str]]:
    slow = conditions.compare({0: host}, plan)
    return [(slowness.ranks, slowness.cause, slowness.text) for slowness in slow]


@pytest.mark.parametrize(
    ("odd", "ranks", "cause", "text"),
    [
        (
            [rank(2, queued=0.9, throttled=0.6)],
            (2,),
            "throttled",
            (
                "the limits of its control group hold rank 2 back 60% of the time (`cpu.max`, or "
                "the container's --cpus)"
            ),
        ),
        (
            [rank(2, queued=0.5)],
            (2,),
            "queued",
            "rank 2 waits 50% of the time for processor 2, which other processes use, too",
        ),
        (
            # What it does for the disk makes it wait on a busy host.
            [rank(2, queued=0.5, written_bytes_per_s=72e6)],
            (2,),
            "queued",
            (
                "rank 2 waits 50% of the time for processor 2, which other processes use, too; it "
                "writes 68.7 MiB a second to a disk"
            ),
        ),
        (
            [rank(place, queued=0.5, processors="2") for place in (2, 3)],
            (2, 3),
            "queued",
            (
                "ranks 2-3 wait 50% of the time for processor 2, to which all of them are bound "
                "(--bind=cores gives each its own)"
            ),
        ),
        (
            [rank(2, queued=0.5, processors="2"), rank(3, processors="2")],
            (2,),
            "queued",
            (
                "rank 2 waits 50% of the time for processor 2, which rank 3 may use, too "
                "(--bind=cores gives each its own)"
            ),
        ),
        (
            [rank(1, stolen=0.34)],
            (1,),
            "stolen",
            "the hypervisor gives the processors of rank 1 to others 34% of the time",
        ),
    ],
)
def test_a_rank_that_is_held_back_is_named_with_what_holds_it(
    odd: list[RankConditions], ranks: tuple[int, ...], cause: str, text: str
) -> None:
    assert told(host(*odd)) == [(ranks, cause, text)]


def test_ranks_that_are_all_held_back_are_not_slower_than_each_other() -> None:
    assert told(host(*(rank(place, queued=0.6, throttled=0.5) for place in range(4)))) == []
    assert told(host(*(rank(place, queued=0.6) for place in range(3)))) == []


def late(place: int, collectives: float, **changes: object) -> list[RankConditions]:
    """Return four ranks that record collectives; the rank at PLACE waits less."""
    others = [rank(other, collectives=0.6, running=0.3) for other in range(4) if other != place]
    return [*others, rank(place, collectives=collectives, **changes)]


@pytest.mark.parametrize(
    ("changes", "cause", "text"),
    [
        (
            {"running": 0.2, "read_bytes_per_s": 12e6},
            "data",
            "rank 3 waits 65% of the time for its data; it reads 11.4 MiB a second from a disk",
        ),
        (
            {"running": 0.2, "written_bytes_per_s": 72e6},
            "data",
            "rank 3 waits 65% of the time; it writes 68.7 MiB a second to a disk",
        ),
        (
            {"running": 0.2},
            "data",
            (
                "rank 3 waits 65% of the time, neither on a processor nor in a collective: for its "
                "data, a disk or a lock (`fleetrun stacks`)"
            ),
        ),
        (
            {"running": 0.8},
            "work",
            "rank 3 computes longer (80% of the time on a processor, others 30%)",
        ),
        # Libraries compute in several threads, the main one among them.
        (
            {"running": 0.8, "threads": 2.4},
            "work",
            "rank 3 computes longer (80% of the time on a processor, others 30%)",
        ),
        # Its memory was swapped out, as measured: a page comes fast, so it waits for processors.
        (
            {"running": 0.18, "queued": 0.6, "faults_per_s": 7000.0, "read_bytes_per_s": 29e6},
            "paging",
            (
                "rank 3 waits for pages of its memory, 7000 of which a second come from a disk: "
                "swap, or mapped files that do not fit into memory (`free -m`, and the limit of "
                "its control group)"
            ),
        ),
        # It gets Python's lock half of the time, so it runs for as long as it does otherwise.
        (
            {"running": 0.32, "threads": 0.56},
            "threads",
            (
                "other threads of rank 3 compute 56% of the time while it waits: they hold "
                "Python's lock (GIL) or prepare its data (`fleetrun stacks`)"
            ),
        ),
        # On a full host, it waits for a processor each time that it gets the lock.
        (
            {"running": 0.3, "queued": 0.6, "threads": 0.4},
            "threads",
            (
                "other threads of rank 3 compute 40% of the time while it waits: they hold "
                "Python's lock (GIL) or prepare its data (`fleetrun stacks`)"
            ),
        ),
        # The kernel does not say how long its threads run.
        (
            {"running": 0.6, "threads": -1.0},
            "work",
            "rank 3 computes longer (60% of the time on a processor, others 30%)",
        ),
        (
            {"running": 0.3, "throttled": 0.5},
            "throttled",
            (
                "the limits of its control group hold rank 3 back 50% of the time (`cpu.max`, or "
                "the container's --cpus)"
            ),
        ),
    ],
)
def test_a_rank_for_which_others_wait_in_collectives_is_named(
    changes: dict[str, object], cause: str, text: str
) -> None:
    text += "; others wait in collectives for 50% more of the time"
    assert told(host(*late(3, 0.1, **changes))) == [((3,), cause, text)]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        # It writes and waits for the disk, and for a processor each time it goes on.
        ({"running": 0.05, "queued": 0.35}, "data"),
        # It has more to compute, and waits for a processor as long for each second of it.
        ({"running": 0.3, "queued": 0.6}, "work"),
        # Its own processor is fuller than the others'.
        ({"running": 0.1, "queued": 0.75}, "queued"),
        ({"running": -1.0, "queued": 0.75}, "queued"),
        # It waits a little less longer than what stands out by itself.
        ({"running": 0.1, "queued": 0.34, "collectives": 0.54}, "queued"),
    ],
)
def test_where_all_wait_for_processors_that_is_no_cause_by_itself(
    changes: dict[str, object], cause: str
) -> None:
    ranks = [rank(place, collectives=0.7, running=0.1, queued=0.2) for place in range(3)]
    slow = told(host(*ranks, rank(3, **{"collectives": 0.1, **changes})))
    assert [(places, why) for places, why, _ in slow] == [((3,), cause)]


@pytest.mark.parametrize(
    ("usual", "late"),
    [
        # In a collective, a rank that waits for a processor does both at once.
        ((0.042, 0.508, 0.664), (0.044, 0.657, 0.342)),
        # Both ranks do the same: hardly more on a processor is no more to compute.
        ((0.04, 0.43, 0.5), (0.06, 0.61, 0.33)),
    ],
)
def test_on_a_host_that_is_very_full_a_rank_waits_for_a_processor(
    usual: tuple[float, ...], late: tuple[float, ...]
) -> None:
    """Measured on a host with twenty times as much to run as it has processors."""
    parts = ("running", "queued", "collectives")
    ranks = [
        rank(place, **dict(zip(parts, shares, strict=True)))
        for place, shares in enumerate((usual, late))
    ]
    (slow,) = conditions.compare(
        {0: HostConditions(0, tuple(ranks), (), ())}, plans.plan(per_node=2)
    )
    assert (slow.ranks, slow.cause) == ((1,), "queued")


@pytest.mark.parametrize("collectives", [(-1.0, -1.0), (0.68, 0.82)])
def test_two_of_three_ranks_on_one_processor_are_named(collectives: tuple[float, float]) -> None:
    """The second times are those of Paddle's own reducer, whose backwards count as collectives."""
    pinned, free = collectives
    ranks = [rank(place, queued=0.5, processors="0", collectives=pinned) for place in (0, 1)]
    ranks += [rank(2, collectives=free)]
    (slow,) = conditions.compare(
        {0: HostConditions(0, tuple(ranks), (), ())}, plans.plan(per_node=3)
    )
    assert (slow.ranks, slow.cause) == ((0, 1), "queued")


def test_a_rank_that_is_held_back_while_nobody_waits_for_it_is_not_named() -> None:
    assert told(host(*late(3, 0.55, queued=0.5))) == []


def gpu(number: int, **changes: object) -> GpuConditions:
    usual = GpuConditions(number, (number,), 0, 61.0, 1980, 0, ())
    return usual._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"throttle": 0x40, "temperature_c": 88.0},
            "GPU 1 of rank 1 is slowed down: it is too hot (hardware thermal slowdown) (88 °C)",
        ),
        ({"clock_mhz": 1200}, "GPU 1 of rank 1 runs at 1200 MHz, the others at 1980 (61 °C)"),
        ({"strangers": (4711,)}, "GPU 1 of rank 1 is used by another program, too (pid 4711)"),
        ({"ecc_errors": 2}, "GPU 1 of rank 1 has had 2 uncorrected ECC errors just now"),
    ],
)
def test_the_gpu_that_is_slower_than_the_others_is_named(
    changes: dict[str, object], text: str
) -> None:
    gpus = tuple(gpu(number, **changes if number == 1 else {}) for number in range(4))
    assert told(host(gpus=gpus)) == [((1,), "gpu", text)]


def test_gpus_that_are_all_slowed_down_are_alike() -> None:
    # Like a power cap, which limits all of them, and is no fault.
    assert told(host(gpus=tuple(gpu(number, throttle=0x44) for number in range(4)))) == []


def linked(nodes: int, links: dict[tuple[int, int], LinkConditions]) -> dict[int, HostConditions]:
    """Return hosts of one rank each, with LINKS from the first to the second of each pair."""
    return {
        node: HostConditions(
            0,
            (rank(node),),
            (),
            tuple(
                links.get((node, other), LinkConditions(other, 0.0002, 1e9, 0.0))
                for other in range(nodes)
                if other != node
            ),
        )
        for node in range(nodes)
    }


def hosts_of(number: int) -> LaunchPlan:
    return plans.plan(hosts=tuple("abcdef"[:number]), per_node=1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rtt_s": 0.0402}, "round trips take 40.2 ms, elsewhere 0.2"),
        ({"bytes_per_s": 2e6}, "it carries 1.91 MiB a second, others 954 MiB"),
        ({"resent": 0.034}, "3.4% of the segments are lost"),
    ],
)
@pytest.mark.parametrize("is_inward", [False, True])
def test_the_host_whose_best_link_is_bad_is_named(
    changes: dict[str, float], text: str, *, is_inward: bool
) -> None:
    links = {
        ((other, 2) if is_inward else (2, other)): LinkConditions(
            2 if is_inward else other, 0.0002, 1e9, 0.0
        )._replace(**changes)  # type: ignore[arg-type]
        for other in (0, 1, 3)
    }
    slow = conditions.compare(linked(4, links), hosts_of(4))
    assert slow == (conditions.Slowness((2,), "link", f"the link of c (rank 2) is slow: {text}"),)


def test_one_bad_pair_names_no_host() -> None:
    bad = LinkConditions(1, 0.04, 2e6, 0.03)
    links = {(0, 1): bad, (1, 0): bad._replace(node=0)}
    assert conditions.compare(linked(4, links), hosts_of(4)) == ()


def test_of_two_hosts_only_a_link_that_loses_is_told_of_and_no_end_is_blamed() -> None:
    slow = {(0, 1): LinkConditions(1, 0.04, 2e6, 0.0)}
    assert conditions.compare(linked(2, slow), hosts_of(2)) == ()
    bad = {(0, 1): LinkConditions(1, 0.0002, 1e9, 0.05)}
    text = "the link between a and b is bad: 5.0% of the segments are lost"
    slowness = conditions.compare(linked(2, bad), hosts_of(2))
    assert slowness == (conditions.Slowness((), "link", text),)


# Measurements of a host ---------------------------------------------------------------------------


def measured(first: MetricsRecord, *later: MetricsRecord) -> HostConditions | None:
    plan = plans.plan(hosts=("a", "b"), per_node=2)
    return conditions.measured((first, *later), plan, {"a": 0, "b": 1}.get)


def record(at: float, queued_s: float, link: LinkUse, gpu: GpuUsage) -> MetricsRecord:
    made = a_record()
    ranks = tuple(
        use._replace(
            queued_s=queued_s,
            main_s=at,
            process_s=1.25 * at,
            throttled_s=None,
            processors="0-1",
            major_faults=int(700 * at),
        )
        for use in made.ranks
    )
    return made._replace(monotonic=at, ranks=ranks, links=(link,), gpus=(gpu,))


def test_what_a_host_measures_becomes_shares_of_the_time() -> None:
    (gpu,) = a_record().gpus
    hot = gpu._replace(throttle=0x44, clock_mhz=1500, ecc_errors=1, strangers=(7, 8))
    first = record(10.0, 1.0, LinkUse("b", None, 5 << 20, 1.0, 1000, 3), hot)
    middle = record(
        15.0, 2.0, LinkUse("b", 0.002, 8 << 20, 2.0, 1500, 3), hot._replace(throttle=0x04)
    )
    last = record(
        20.0,
        6.0,
        LinkUse("b", 0.001, 25 << 20, 3.0, 2000, 13),
        hot._replace(strangers=(8,), ecc_errors=3),
    )
    shares = measured(first, middle, last)
    assert shares is not None
    assert shares.ranks[0] == RankConditions(
        *(0, 0.5, 1.0, 0.25, -1.0, -1.0, -1.0, 0.0, 0.0, 700.0, "0-1")
    )
    # The read bytes of rank 1 are unknown.
    assert [rank.read_bytes_per_s for rank in shares.ranks] == [0.0, -1.0]
    assert shares.links == (LinkConditions(1, 0.001, 10 << 20, 0.01),)
    assert shares.gpus == (GpuConditions(0, (0,), 0x04, 61.0, 1500, 2, (8,)),)


def test_other_ranks_and_other_peers_are_not_compared() -> None:
    (gpu,) = a_record().gpus
    link = LinkUse("elsewhere", 0.001, 25 << 20, 3.0, 2000, 13)
    first, last = record(10.0, 1.0, link, gpu), record(20.0, 1.0, link, gpu)
    told = measured(first, last)
    assert told is not None
    assert told.links == ()
    assert measured(first, last._replace(ranks=last.ranks[:1])) is None
    assert measured(first, first) is None


@pytest.mark.parametrize(
    ("processors", "is_read"),
    [
        ("", True),
        ("0-3,8", True),
        ("0-8191", True),
        # A truncated list.
        ("0-3,8-", True),
        # Ranges are expanded where ranks are compared.
        ("0-999999999", False),
        ("1," * 101, False),
        ("all", False),
    ],
)
def test_another_host_cannot_make_this_one_count_for_ever(processors: str, is_read: bool) -> None:
    message = host(rank(0, processors=processors))
    sent = CODEC.write(message)
    if is_read:
        assert CODEC.read(sent) == message
        return
    with pytest.raises(Malformed, match="processors is not what it must be"):
        CODEC.read(sent)
