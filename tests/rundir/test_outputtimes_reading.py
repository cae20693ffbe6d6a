"""output.times is read as far as possible, whatever it contains, and while it grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.rundir import outputtimes
from fleetrun.rundir.outputtimes import LogTimes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def parsed(folder: Path, text: bytes) -> Mapping[str, LogTimes]:
    (folder / "times").write_bytes(text)
    return outputtimes.Reader(str(folder / "times")).read()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    text = outputtimes.noted(990, 9, "a \udcff") + outputtimes.noted(995, 7, "a \udcff")
    text += outputtimes.noted(1020, 9, "b") + outputtimes.noted(1010, 10, "b") + b"x\n1 b\n- 1 b\n"
    assert parsed(tmp_path, text) == {
        # It was cut.
        "a \udcff": LogTimes([995], [7]),
        # The clock was set back.
        "b": LogTimes([1020, 1020], [9, 10]),
    }


def test_a_file_that_grows_is_read_on_and_half_a_line_is_none(tmp_path: Path) -> None:
    path = tmp_path / "times"
    reader = outputtimes.Reader(str(path))
    assert reader.read() == {}
    path.write_bytes(b"10 3 b\n20 4")
    assert reader.read()["b"].offsets == [3]
    with path.open("ab") as file:
        file.write(b"0 b\n")
    assert reader.read()["b"].offsets == [3, 40]
