"""Whatever is in an error file, something can be told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetrun.records.errorfile import ErrorReport, read_error
from fleetrun.records.heartbeat import beat, read_step

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
    path = tmp_path / "error.3.json"
    path.write_text(json.dumps(WHOLE))
    assert read_error(str(path)) == ErrorReport(
        3, "h", 7, 1.5, 2, "ValueError", "caf\\udce9", "Traceback\n", monotonic=0.5, code=3
    )


def test_s21_half_a_file_is_raw_text(tmp_path: Path) -> None:
    path = tmp_path / "error.3.json"
    path.write_text('{"rank": 3, "mess')
    assert read_error(str(path)) == ErrorReport(raw='{"rank": 3, "mess')
    assert read_error(str(tmp_path / "none")) is None
    assert read_error(str(tmp_path)) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text() | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.sampled_from([*WHOLE]), inner, max_size=4)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_s21_no_file_breaks_the_reader(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "error.0.json"
    path.write_bytes(text)
    found = read_error(str(path))
    assert found is not None
    for part in (found.raw, found.host, found.kind, found.message, found.stack):
        part.encode()


def test_a_heartbeat_may_tell_the_step(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.0"
    assert read_step(str(path)) is None
    assert beat(str(path), 0) == 0
    for text, step in (("120\n", 120), ("", None), ("7 of 9", 7), ("soon", None), ("-1", None)):
        path.write_text(text)
        assert read_step(str(path)) == step
    now = path.stat().st_mtime_ns
    assert beat(str(path), now) == now
    assert beat(str(path), now + 1) == 0
    assert read_step(str(tmp_path)) is None


def test_s21_numbers_that_no_clock_has_are_no_times(tmp_path: Path) -> None:
    path = tmp_path / "error.0.json"
    path.write_text(f'{{"time": 1{"0" * 400}, "monotonic": NaN, "rank": true, "message": "m"}}')
    assert read_error(str(path)) == ErrorReport(message="m")
