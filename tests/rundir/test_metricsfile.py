"""metrics.jsonl is read back as it was written, and as far as possible whatever it contains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from runfolders import a_record

from fleetrun.rundir import metricsfile

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    nan = a_record().ranks[0]._replace(loss=float("nan"))
    record = a_record()._replace(ranks=(nan, a_record().ranks[1]))
    assert metricsfile.append(str(path), a_record()) == path.stat().st_size
    metricsfile.append(str(path), record)
    first, second = metricsfile.spread(str(path), 8)
    assert first == a_record()
    assert metricsfile.newest(str(path)) == second
    with path.open("a") as file:
        file.write('{"schema": 1, "half')
    assert metricsfile.newest(str(path)) == second
    assert metricsfile.newest(str(tmp_path / "none")) is None
    # JSON has no NaN.
    assert second.ranks[0].loss is None


def test_of_many_lines_some_are_read_that_are_spread_evenly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for number in range(100):
        metricsfile.append(str(path), a_record()._replace(time=float(number)))
    told = [record.time for record in metricsfile.spread(str(path), 8)]
    assert told == [*map(float, range(0, 100, 13)), 99.0]
    assert metricsfile.spread(str(tmp_path / "none"), 8) == ()


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(OSError, match="symbolic links"):
        metricsfile.append(str(tmp_path / "link"), a_record())
    assert not (tmp_path / "target").exists()
