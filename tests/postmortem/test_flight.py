"""The rank that keeps the others waiting, derived from the records of hanging ranks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.postmortem import flight
from fleetrun.postmortem.flight import (
    CYCLE,
    DESYNC,
    MISSING,
    UNFINISHED,
    JobRanks,
    RankState,
)
from fleetrun.rundir.flightfile import (
    ASYNCHRONOUS,
    BLOCKING,
    Collective,
    CollectiveChannel,
    FlightRecord,
)
from fleetrun.rundir.rankfile import RankAxes

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "barrier")
SITE = ("/job/train.py", 7, "step")


class Call(NamedTuple):
    """A collective of a group in a script, or a send or recv."""

    channel: CollectiveChannel
    operation: str
    size: int = 4


def p2p(operation: str, source: int, target: int, ranks: int) -> Call:
    channel = CollectiveChannel(tuple(range(ranks)), 1, operation, source, target)
    return Call(channel, operation)


def play(
    scripts: dict[int, list[Call]],
    *,
    dead: frozenset[int] = frozenset(),
    is_blocking: bool = True,
) -> dict[int, FlightRecord]:
    """Run SCRIPTS of ranks, whose calls wait for their peers, until all are stuck.

    Calls between the DEAD and others are never done.
    """
    at = dict.fromkeys(scripts, 0)
    counts: dict[tuple[int, CollectiveChannel], int] = {}
    made: dict[int, list[Collective]] = {rank: [] for rank in scripts}
    entered: dict[tuple[CollectiveChannel, int], set[int]] = {}
    moment = 0.0
    while True:
        before = dict(at)
        for rank, script in scripts.items():
            if at[rank] >= len(script):
                continue
            call = script[at[rank]]
            if len(made[rank]) == at[rank]:
                moment += 1.0
                sequence = counts[rank, call.channel] = counts.get((rank, call.channel), 0) + 1
                entered.setdefault((call.channel, sequence), set()).add(rank)
                made[rank].append(
                    Collective(
                        call.channel,
                        sequence,
                        call.operation,
                        issued_at=moment,
                        shape=(call.size,),
                        dtype="float32",
                        site=SITE,
                        state=BLOCKING if is_blocking else ASYNCHRONOUS,
                    )
                )
            last = made[rank][-1]
            if _is_whole(last, entered, dead):
                moment += 1.0
                made[rank][-1] = last._replace(done_at=moment)
                at[rank] += 1
        if at == before and all(
            len(made[rank]) > at[rank] or at[rank] == len(scripts[rank]) for rank in scripts
        ):
            return {
                rank: FlightRecord(
                    *(rank, 100 + rank, 0, tuple(made[rank])),
                    {channel: count for (who, channel), count in counts.items() if who == rank},
                )
                for rank in scripts
            }


def play_all(steps: dict[int, list[list[Call]]]) -> dict[int, FlightRecord]:
    """Run STEPS of ranks whose calls block."""
    return play({rank: [call for step in own for call in step] for rank, own in steps.items()})


def issued_ahead(steps: dict[int, list[list[Call]]]) -> dict[int, FlightRecord]:
    """Run STEPS of ranks on devices: a rank issues a whole step before it waits for its device."""
    records = play(
        {rank: [call for step in own for call in step] for rank, own in steps.items()},
        is_blocking=False,
    )
    for rank, own in steps.items():
        record = records[rank]
        made = len(record.collectives)
        ends = [sum(map(len, own[: number + 1])) for number in range(len(own))]
        issued = next((end for end in ends if end >= made), made)
        calls, last = list(record.collectives), dict(record.last)
        for call in [call for step in own for call in step][made:issued]:
            last[call.channel] = last.get(call.channel, 0) + 1
            calls.append(
                Collective(
                    *(call.channel, last[call.channel], call.operation),
                    issued_at=calls[-1].issued_at + 0.001,
                    shape=(call.size,),
                    dtype="float32",
                    site=SITE,
                    state=ASYNCHRONOUS,
                )
            )
        # The moments of `play` are seconds.
        records[rank] = record._replace(collectives=tuple(calls), last=last, settled_at=1e6)
    return records


def _is_whole(
    collective: Collective,
    entered: dict[tuple[CollectiveChannel, int], set[int]],
    dead: frozenset[int],
) -> bool:
    channel = collective.channel
    if channel.is_pair:
        other = channel._replace(operation="recv" if channel.operation == "send" else "send")
        pair = {channel.source, channel.target}
        return bool(entered.get((other, collective.sequence))) and not (pair & dead and pair - dead)
    members = set(channel.ranks)
    is_cut = bool(members & dead and members - dead)
    return entered[channel, collective.sequence] == members and not is_cut


@pytest.mark.parametrize(
    ("operation", "root", "rank", "holds"),
    [
        ("all_reduce (max)", -1, 0, True),
        ("send", -1, 0, False),
        ("broadcast", 0, 0, False),
        ("broadcast", 1, 0, True),
        ("broadcast", 2, 0, False),
        ("reduce", 0, 0, True),
        ("gather", 1, 0, False),
    ],
)
def test_a_call_is_complete_only_if_nobody_whom_it_needs_is_absent(
    operation: str, root: int, rank: int, holds: bool
) -> None:
    channel = CollectiveChannel((0, 1, 2))
    if operation == "send":
        channel = CollectiveChannel((0, 1, 2), 1, "send", 0, 1)
    call = Collective(channel, 1, operation, 1.0, 2.0, root=root, state=ASYNCHRONOUS)
    here = FlightRecord(rank, 100, 0, (call,), {channel: 1})
    there = {1: FlightRecord(1, 101, 0), 2: FlightRecord(2, 102, 0, (), {channel: 1})}
    missed = flight.verdict({rank: here, **there}, flight.JobRanks(3))
    assert [finding.ranks for finding in missed] == [(1,)] * holds


def scripts_of(draw: random.Random, ranks: int) -> dict[int, list[Call]]:
    """Return a script for each of RANKS: the same collectives of the same groups in one order."""
    groups = [CollectiveChannel(tuple(range(ranks)))]
    groups += [CollectiveChannel((first, first + 1)) for first in range(0, ranks - 1, 2)]
    groups += [CollectiveChannel(tuple(range(0, ranks, 2)))] if ranks > 2 else []
    scripts: dict[int, list[Call]] = {rank: [] for rank in range(ranks)}
    for _ in range(draw.randint(3, 20)):
        channel = draw.choice(groups)
        call = Call(channel, draw.choice(OPERATIONS), draw.randint(1, 3))
        for rank in channel.ranks:
            scripts[rank].append(call)
    # Each step ends with a collective of all ranks, such as an averaged loss.
    for script in scripts.values():
        script.append(Call(groups[0], "all_reduce", 1))
    return scripts


@given(seed=st.integers(0, 10**9), ranks=st.integers(2, 9))
def test_a_job_in_which_nothing_is_wrong_has_no_finding(seed: int, ranks: int) -> None:
    records = play(scripts_of(random.Random(seed), ranks))
    assert flight.verdict(records, JobRanks(ranks)) == ()


@given(seed=st.integers(0, 10**9), ranks=st.integers(2, 9))
def test_the_rank_that_stops_is_named_alone(seed: int, ranks: int) -> None:
    draw = random.Random(seed)
    scripts = scripts_of(draw, ranks)
    culprit = draw.randrange(ranks)
    del scripts[culprit][draw.randrange(len(scripts[culprit])) :]
    findings = flight.verdict(
        play(scripts), JobRanks(ranks, states={culprit: RankState("data.py:88")})
    )
    assert [finding.ranks for finding in findings] == [(culprit,)]
    assert findings[0].kind == MISSING
    assert findings[0].text.startswith(f"rank {culprit} never entered ")
    # "It" could be the rank that waits, if that is only one.
    its = f"rank {culprit}" if "; rank" in findings[0].text else "it"
    assert findings[0].text.endswith(f"; {its} stands in data.py:88")


@given(seed=st.integers(0, 10**9), ranks=st.integers(3, 9))
def test_the_rank_that_calls_something_else_is_named_alone(seed: int, ranks: int) -> None:
    draw = random.Random(seed)
    scripts = scripts_of(draw, ranks)
    culprit = draw.randrange(ranks)
    where = len(scripts[culprit]) - 1
    world = CollectiveChannel(tuple(range(ranks)))
    wrong = draw.choice((Call(world, "reduce"), Call(world, "all_reduce", 9)))
    scripts[culprit][where] = wrong
    (finding,) = flight.verdict(play(scripts), JobRanks(ranks))
    assert (finding.kind, finding.ranks) == (DESYNC, (culprit,))


@given(seed=st.integers(0, 10**9), ranks=st.integers(2, 9))
def test_a_dead_network_is_no_rank(seed: int, ranks: int) -> None:
    draw = random.Random(seed)
    dead = frozenset(draw.sample(range(ranks), draw.randint(1, ranks - 1)))
    (finding,) = flight.verdict(play(scripts_of(draw, ranks), dead=dead), JobRanks(ranks))
    assert (finding.kind, finding.ranks) == (UNFINISHED, ())


@given(ranks=st.integers(2, 7), shift=st.integers(1, 6))
def test_a_circle_of_receivers_is_drawn(ranks: int, shift: int) -> None:
    scripts = {}
    for rank in range(ranks):
        before = (rank - shift) % ranks
        if before == rank:
            return
        scripts[rank] = [p2p("recv", before, rank, ranks)]
    (finding,) = flight.verdict(play(scripts), JobRanks(ranks))
    assert finding.kind == CYCLE
    assert " → " in finding.text
    assert "must receive first" not in finding.text


def rings(ranks: int, steps: int = 4) -> dict[int, list[list[Call]]]:
    """Return the exchanges of each rank: to the right, from the left; then all meet."""
    end = [Call(CollectiveChannel(tuple(range(ranks))), "all_reduce")]
    return {rank: [*([_exchange(rank, ranks)] * steps), end * 2, end] for rank in range(ranks)}


def _exchange(rank: int, ranks: int, to: int = 1, by: int = -1) -> list[Call]:
    send = p2p("send", rank, (rank + to) % ranks, ranks)
    recv = p2p("recv", (rank + by) % ranks, rank, ranks)
    # As scripts do whose sends block.
    return [send, recv] if rank % 2 == 0 else [recv, send]


@pytest.mark.parametrize("play_", [play_all, issued_ahead], ids=["gloo", "a device"])
@pytest.mark.parametrize("step", [0, 2, 3])
@pytest.mark.parametrize(("change", "than"), [("skips", "fewer"), ("repeats", "more")])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 3), (1, 4), (3, 4), (2, 5)])
def test_who_skips_or_repeats_an_exchange_in_a_ring_is_named(
    play_: Callable[[dict[int, list[list[Call]]]], dict[int, FlightRecord]],
    *,
    rank: int,
    ranks: int,
    step: int,
    change: str,
    than: str,
) -> None:
    steps = rings(ranks)
    steps[rank][step : step + 1] = [] if change == "skips" else [steps[rank][step]] * 2
    (finding,) = flight.verdict(play_(steps), JobRanks(ranks))
    # Of a circle, all ranks are named; and it waits in the first call that is too many, which might
    # be one that its peer lacks.
    assert rank in finding.ranks
    assert finding.kind == CYCLE or change == "repeats" or finding.ranks == (rank,)


def test_the_verdict_reads_as_people_would_say_it() -> None:
    mp = CollectiveChannel(tuple(range(8, 16)))
    step = Call(mp, "all_reduce")
    records = play({rank: [step] * (3 if rank == 13 else 4) for rank in mp.ranks})
    axes = RankAxes((("dp", 2), ("mp", 8)))
    states = {13: RankState("data.py:88 (next)")}
    (finding,) = flight.verdict(records, JobRanks(16, axes, states))
    text, _, since = finding.text.partition(" since ")
    assert text == (
        "rank 13 (dp 1, mp 5) never entered all_reduce 4 of mp [8-15]; 7 others wait there "
        "in train.py:7"
    )
    assert since.endswith("; it stands in data.py:88 (next)")


def both(first: list[Call], second: list[Call]) -> dict[int, FlightRecord]:
    return play({0: first, 1: second})


WORLD = CollectiveChannel((0, 1))
BACKWARD = CollectiveChannel((0, 1))
SUM = Call(WORLD, "all_reduce")


@pytest.mark.parametrize(
    ("records", "kind", "ranks", "text"),
    [
        pytest.param(
            both([SUM, SUM], [SUM, Call(WORLD, "broadcast")]),
            *(DESYNC, (0, 1)),
            "rank 0 called all_reduce of float32 [4] in train.py:7 where rank 1 called broadcast "
            "of float32 [4] in train.py:7: collective 2 of all ranks",
            id="of two ranks none is the majority",
        ),
        pytest.param(
            both([p2p("send", 0, 1, 2), SUM], []),
            *(MISSING, (1,), "rank 1 never made recv 1 from rank 0, which waits in send"),
            id="a receiver",
        ),
        pytest.param(
            both([Call(BACKWARD, "backward")] * 2, [Call(BACKWARD, "backward")]),
            *(MISSING, (1,), "rank 1 never entered backward 2 of all ranks; rank 0 waits there"),
            id="a backward of Paddle's own reducer",
        ),
        pytest.param(
            both(
                [SUM, Call(CollectiveChannel((0, 1), 2), "barrier")],
                [Call(CollectiveChannel((0, 1), 2), "barrier")],
            ),
            *(CYCLE, (0, 1), "ranks wait for each other in a circle, 0 → 1 → 0: rank 0 in "),
            id="two groups in two orders",
        ),
    ],
)
def test_examples(
    records: dict[int, FlightRecord], kind: str, ranks: tuple[int, ...], text: str
) -> None:
    (finding,) = flight.verdict(records, JobRanks(2))
    assert (finding.kind, finding.ranks) == (kind, ranks)
    assert finding.text.startswith(text)


@pytest.mark.parametrize(("state", "ranks"), [(ASYNCHRONOUS, (1,)), (BLOCKING, ())])
def test_who_never_entered_a_backward_that_has_returned_on_the_others_is_named(
    state: int, ranks: tuple[int, ...]
) -> None:
    whole = CollectiveChannel((0, 1, 2))
    records = play({rank: [Call(whole, "backward")] * 4 for rank in range(3)})
    for rank, number in ((0, 4), (1, 2), (2, 3)):
        calls = tuple(call._replace(state=state) for call in records[rank].collectives[:number])
        records[rank] = records[rank]._replace(collectives=calls, last={whole: number})
    findings = flight.verdict(records, JobRanks(3))
    assert [finding.ranks for finding in findings] == [ranks] * len(ranks)
    for finding in findings:
        assert finding.text.startswith(
            "rank 1 never entered backward 3 of all ranks; 2 others wait there"
        )
