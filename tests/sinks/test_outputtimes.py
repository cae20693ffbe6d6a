"""The times at which logs grew are recorded, by the files' own times."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import plans
import pytest
from timers import Timers

from fleetrun.run.events import Started
from fleetrun.rundir import names, outputtimes
from fleetrun.sinks.outputtimes import OutputTimes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


class Noted:
    """Two ranks' logs, and the recorded times."""

    def __init__(self, folder: Path) -> None:
        self.run = folder / "run"
        self.run.mkdir()
        self.timers = Timers()
        self.plan = plans.plan(cwd=str(folder), log_dir=".", run_dir="run")
        self.sink = OutputTimes(plans.job(self.plan))
        self.sink.open(self.timers)
        self.start(0)

    def start(self, attempt: int) -> None:
        """Let both ranks start."""
        for place in range(2):
            (self.run / names.log_name(f"workerlog.{place}", attempt)).touch()
            self.sink.on_event(Started(place, f"rank {place}", 1, 0.0, attempt))

    def look(self) -> None:
        """Let the sink look at the logs."""
        assert self.timers.elapse("look")

    def write(self, name: str, text: bytes, at: float | None = None) -> None:
        """Append TEXT like a rank; AT becomes the file's modification time."""
        with (self.run / name).open("ab") as file:
            file.write(text)
        if at is not None:
            os.utime(self.run / name, (at, at))

    def told(self) -> Mapping[str, outputtimes.LogTimes]:
        """Return what a reader returns."""
        return outputtimes.Reader(str(self.run / names.OUTPUT_TIMES)).read()


@pytest.fixture
def noted(tmp_path: Path) -> Iterator[Noted]:
    made = Noted(tmp_path)
    yield made
    made.sink.close()


def test_a_look_notes_only_what_has_grown_and_when_it_did(noted: Noted) -> None:
    noted.look()
    assert noted.told() == {}
    at = time.time() - 0.005
    noted.write("workerlog.1", b"12345", at)
    noted.look()
    noted.look()
    assert noted.told()["workerlog.1"] == outputtimes.LogTimes([int(at * 1000)], [5])
    assert "workerlog.0" not in noted.told()
