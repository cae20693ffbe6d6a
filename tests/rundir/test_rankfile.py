"""Whatever a rank's records or an error file contain, their readers return what they can."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fleetrun.model import ProcessSpec
from fleetrun.rundir import rankfile
from fleetrun.rundir.heartbeat import beat, last_step
from fleetrun.rundir.rankfile import ErrorReport, read_error

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


def test_s20_every_field_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank.3.jsonl"
    expected = ErrorReport(
        *(3, "h", 7, 1.5, 2, "ValueError", "caf\\udce9", "Traceback\n"),
        monotonic=0.5,
        code=3,
        path=str(path),
    )
    path.write_text(json.dumps(WHOLE))
    assert read_error(str(path)) == expected
    # A record of another attempt, and one that a full disk truncated.
    lines = [json.dumps({**WHOLE, "kind": "exception"}), '{"kind": "exception", "restart": 2, "m']
    lines.append(json.dumps({**WHOLE, "kind": "exception", "restart": 3, "message": "later"}))
    path.write_text("\n".join(lines) + "\n")
    assert rankfile.error(str(path), restart=2) == expected
    assert rankfile.error(str(path)) is None


def test_the_exception_of_a_process_is_recorded_or_else_left_in_a_file_of_its_own(
    tmp_path: Path,
) -> None:
    records, own = tmp_path / "rank.0.jsonl", tmp_path / "error.0.json"
    env = {"FLEETRUN_RECORDS": str(records), "FLEETRUN_ERROR_FILE": str(own)}
    spec = ProcessSpec("x", ("x",), {**env, "PADDLE_RESTART_COUNT": "2"}, (), "log")
    assert rankfile.exception(spec) is rankfile.exit_under_way(spec) is None
    own.write_text(json.dumps({**WHOLE, "message": "own"}))
    report = rankfile.exception(spec)
    assert report is not None
    assert report.message == "own"
    for kind, change in (("exception", {}), ("exit", {}), ("exit", {"code": None})):
        with records.open("a") as file:
            print(json.dumps({**WHOLE, "kind": kind, **change}), file=file)
        report = rankfile.exception(spec)
        assert report is not None
        assert report.path == str(records)
        assert (rankfile.exit_under_way(spec) is not None) == (kind == "exit" and not change)
    # Each attempt has a file of its own; a program need not say which it is.
    own.write_text(json.dumps({"message": "own"}))
    records.unlink()
    report = rankfile.exception(spec)
    assert report is not None
    assert report.text == "own"


def test_s20_what_a_program_says_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "error.3.json"
    for document, text in (
        ({"class": "DeviceError", "message": "lost"}, "DeviceError: lost"),
        ({"message": "lost"}, "lost"),
        ({"class": "DeviceError", "stack": "here\n"}, "here\n"),
        ({"class": "E", "message": "lost", "stack": "here\n"}, "here\nE: lost"),
        ({"class": "E", "message": "lost\nit", "stack": "here\nE: lost\nit"}, "here\nE: lost\nit"),
        ({"reason": "lost", "code": 7}, '{"reason": "lost", "code": 7}'),
    ):
        path.write_text(json.dumps(document))
        error = read_error(str(path))
        assert error is not None
        assert error.text == text


def test_s21_half_a_file_is_raw_text(tmp_path: Path) -> None:
    path = tmp_path / "error.3.json"
    path.write_text('{"rank": 3, "mess')
    assert read_error(str(path)) == ErrorReport(raw='{"rank": 3, "mess', path=str(path))
    assert read_error(str(tmp_path / "none")) is None
    assert read_error(str(tmp_path)) is None


def test_a_heartbeat_may_tell_the_step(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.0"
    assert last_step([str(path)]) is None
    assert beat(str(path), 0) == 0
    for text, step in (("120\n", 120), ("", None), ("7 of 9", 7), ("soon", None), ("-1", None)):
        path.write_text(text)
        assert last_step([str(path)]) == step
    now = path.stat().st_mtime_ns
    assert beat(str(path), now) == now
    assert beat(str(path), now + 1) == 0
    assert last_step([str(tmp_path)]) is None
