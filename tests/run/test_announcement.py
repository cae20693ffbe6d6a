"""The launcher of a --detach job reports to the process in the foreground."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from timers import Timers

from fleetrun.run.background import Background
from fleetrun.rundir.folder import Folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("ends_first", [False, True])
def test_the_foreground_waits_until_all_observers_know_of_the_processes(
    tmp_path: Path, *, ends_first: bool
) -> None:
    # Links such as log/workerlog.0 are made when observers learn of the start, after `open`.
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    lines: list[str] = []
    background = Background(str(tmp_path / "console"), writer)
    background.sink(Folder(str(tmp_path)), lines.append, os.getpid())
    timers = Timers()
    background.open(timers)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    if ends_first:
        background.close()
    else:
        timers.elapse_all()
        background.close()
    assert os.read(reader, 8) == b"."
    os.close(reader)
    (line,) = lines
    assert line.startswith(f"running in the background as process {os.getpid()}: ")
