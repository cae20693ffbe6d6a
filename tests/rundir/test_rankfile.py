"""Whatever a rank's records contain, their readers return what they can."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fleetrun.model import ProcessSpec
from fleetrun.rundir import rankfile
from fleetrun.rundir.heartbeat import beat, last_step, read

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = {
    "schema": 1,
    "rank": 3,
    "host": "h",
    "pid": 7,
    "time": 1.5,
    "restart": 2,
    "class": "ValueError",
    "message": "caf\udce9",
    "stack": "Traceback\n",
    "monotonic": 0.5,
    "code": 3,
}


def test_an_exit_counts_unless_it_is_caught_or_well(tmp_path: Path) -> None:
    records = tmp_path / "rank.0.jsonl"
    env = {"FLEETRUN_RECORDS": str(records), "PADDLE_RESTART_COUNT": "2"}
    spec = ProcessSpec("x", ("x",), env, (), "log")
    assert rankfile.exception(spec) is rankfile.exit_under_way(spec) is None
    for kind, change in (("exception", {}), ("exit", {}), ("exit", {"code": None})):
        with records.open("a") as file:
            print(json.dumps({**WHOLE, "kind": kind, **change}), file=file)
        report = rankfile.exception(spec)
        assert report is not None
        assert report.text == "Traceback\n"
        assert (rankfile.exit_under_way(spec) is not None) == (kind == "exit" and not change)


def test_a_heartbeat_may_tell_the_step(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.0"
    assert last_step([str(path)]) is None
    assert beat(str(path), 0) == 0
    for text, step in (("120\n", 120), ("", None), ("7 of 9", 7), ("soon", None), ("-1", None)):
        path.write_text(text)
        assert last_step([str(path)]) == step
    path.write_text("9 update 1 10.500 8 12.000\nleft of something longer")
    assert read(str(path)) == (9, ((10.5, 1), (12.0, 8)), False)
    now = path.stat().st_mtime_ns
    assert beat(str(path), now) == now
    assert beat(str(path), now + 1) == 0
    assert last_step([str(tmp_path)]) is None
