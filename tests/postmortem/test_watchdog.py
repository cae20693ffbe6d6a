"""Logs of Paddle's watchdog, in the format of its source, name the rank that others wait for."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fleetrun.postmortem import flight, flightnames, watchdog

NOW = time.mktime((2026, 11, 26, 10, 10, 0, 0, 0, -1))
AT = "1126 10:08:11.123456  7012 comm_task_manager.cc"


def trace(
    rank: int, count: int, *, op: str = "ALLREDUCE", done: bool = False, **more: object
) -> str:
    fields = {"group_key": "nccl_ids/0/0", "group_ranks": "0~3", "nranks": 4, **more}
    return (
        f"group_key:{fields['group_key']},group_ranks:{fields['group_ranks']},global_rank:{rank},"
        f"local_rank:{rank},comm_count:{count},op:{op},started:1,completed:{int(done)},"
        f"numel:1024,nranks:{fields['nranks']}"
    )


def last(rank: int, count: int, at: str = AT, **more: Any) -> str:
    message = trace(rank, count, done=True, **more)
    return f"I{at}:113] Find last group comm task:part:0/1,{message}\n\n"


def waits(rank: int, count: int, at: str = AT, **more: Any) -> str:
    message = trace(rank, count, **more)
    return f"W{at}:170] Find timeout start but not finish task:{message}\n"


def finding(logs: dict[int, str]) -> tuple[flightnames.FlightFinding, ...]:
    texts = {rank: watchdog.lines(f"step 3 loss 1.5\n{log}") for rank, log in logs.items()}
    records = {
        rank: watchdog.parse(rank, text, timeout_s=60.0, now=NOW) for rank, text in texts.items()
    }
    known = {rank: record for rank, record in records.items() if record is not None}
    return flight.verdict(watchdog.current(known), flightnames.JobRanks(4))


def test_the_rank_that_lags_in_a_group_is_named_with_the_operation() -> None:
    logs = {rank: last(rank, 37) + waits(rank, 38) for rank in (0, 2, 3)}
    (verdict,) = finding({1: last(1, 37), **logs})
    assert (verdict.kind, verdict.ranks) == (flightnames.MISSING, (1,))
    assert verdict.text == (
        "rank 1 never entered NCCL ALLREDUCE 38 of all ranks; 3 others wait there since 10:07:11"
    )
    # A rank whose watchdog logged nothing may be anywhere.
    assert [verdict.ranks for verdict in finding(logs)] in ([], [()])


def test_a_sender_waits_for_its_receiver_and_messages_of_batches_are_left_out() -> None:
    pair: dict[str, Any] = {"group_key": "nccl_ids/5/0->1", "group_ranks": "1~2", "nranks": 2}
    (verdict,) = finding({1: waits(1, 4, op="SEND", **pair), 2: last(2, 3, op="RECV", **pair)})
    assert verdict.ranks == (2,)
    assert "never entered NCCL SEND/RECV 4 of ranks 1-2; rank 1 waits" in verdict.text
    assert finding({1: waits(1, 4, op="SEND"), 2: last(2, 3, op="RECV")}) == ()


@pytest.mark.parametrize("after", ["Finish timeout task: ", "Find last group comm task:part:0/1,"])
def test_what_was_only_late_names_nobody(after: str) -> None:
    late = f"I{AT}:190] {after}{trace(0, 38, done=True)}\n"
    assert finding({0: waits(0, 38) + late, 1: last(1, 37)}) == ()


def test_the_last_operations_of_an_earlier_delay_count_for_nothing() -> None:
    earlier = AT.replace("10:08", "10:05")
    verdicts = finding({1: last(1, 37, at=earlier), 0: waits(0, 1038), 2: waits(2, 1038)})
    assert not any(verdict.ranks for verdict in verdicts)


def test_the_time_of_a_line_is_before_now() -> None:
    record = watchdog.parse(0, waits(0, 1, at=f"1231{AT[4:]}"), timeout_s=60.0, now=NOW)
    assert record is not None
    assert time.localtime(record.settled_at).tm_year == 2025


def test_the_timeout_is_paddles() -> None:
    assert watchdog.timeout_s({}) == 1800.0
    assert watchdog.timeout_s({"PADDLE_PG_TIMEOUT": "150000"}) == 150.0
    assert watchdog.timeout_s({"PADDLE_PG_TIMEOUT": "soon"}) == 1800.0
