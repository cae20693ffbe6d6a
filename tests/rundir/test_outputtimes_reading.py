"""output.times is read as far as possible, whatever it contains, and while it grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from fleetrun.rundir import outputtimes
from fleetrun.rundir.outputtimes import LogTimes

if TYPE_CHECKING:
    from pathlib import Path

BEGIN = outputtimes.head(1000) + outputtimes.named(0, "a \udcff") + outputtimes.named(1, "b")


def parsed(text: bytes) -> dict[str, LogTimes]:
    notes = outputtimes.Notes()
    notes.feed(text)
    return notes.logs


def test_what_was_written_is_read() -> None:
    text = BEGIN + outputtimes.noted(-5, 0, 7) + outputtimes.moved(0, 4)
    text += outputtimes.noted(20, 1, 9) + outputtimes.moved(1, 8)
    assert parsed(text) == {
        "a \udcff": LogTimes([995], [7], [4]),
        "b": LogTimes([1020], [9], [8]),
    }


@given(st.lists(st.binary(max_size=20)))
def test_nothing_that_a_file_may_hold_is_an_error(lines: list[bytes]) -> None:
    logs = parsed(BEGIN + b"\n".join(lines) + b"\n")
    assert {"a \udcff", "b"} <= set(logs) or any(line.startswith(b"=") for line in lines)
    for log in logs.values():
        assert len(log.at_ms) == len(log.offsets)
        assert log.offsets == sorted(log.offsets)


def test_a_file_that_grows_is_read_on_and_half_a_line_is_none(tmp_path: Path) -> None:
    path = tmp_path / "times"
    reader = outputtimes.Reader(str(path))
    assert reader.read() == {}
    path.write_bytes(BEGIN + b"10 1 3\n20 1 4")
    assert reader.read()["b"].offsets == [3]
    with path.open("ab") as file:
        file.write(b"0\n")
    assert reader.read()["b"].offsets == [3, 40]
