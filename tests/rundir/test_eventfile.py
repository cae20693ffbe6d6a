"""events.jsonl is read back as it was written, and as far as possible whatever it contains."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fleetrun.rundir import eventfile
from fleetrun.rundir.eventfile import EventRecord

if TYPE_CHECKING:
    from pathlib import Path

    from fleetrun.rundir.eventfile import Value


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    process: dict[str, Value] = {"process": "trainer.1", "rank": 1, "attempt": 2}
    more = {**process, "pid": 7, "text": "my secret"}
    eventfile.append(fd, "started", 3.5, more, lambda text: text.replace("secret", "***"))
    os.close(fd)
    (read,) = eventfile.read(str(path))
    expected = EventRecord(
        "started", read.time, 3.5, "trainer.1", 1, 2, {"pid": 7, "text": "my ***"}
    )
    assert read == expected
