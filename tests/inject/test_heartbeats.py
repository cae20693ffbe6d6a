"""The heartbeat of a rank: later quick updates write it now and then, all others each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleetrun.inject import heartbeats, updates

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("takes_s", "written"),
    [
        pytest.param(0.25, [33, 34, 35], id="slow"),
        # In 0.1 s seven of them, of a 64th of a second.
        pytest.param(0.015625, [39, 46, 53], id="quick"),
    ],
)
def test_the_first_heartbeats_are_written_and_one_every_tenth_of_a_second(
    takes_s: float, written: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "heartbeat"
    heartbeat = heartbeats.HeartbeatFile(str(path))
    seen = [0]
    for number in range(1, written[-1] + 1):
        monkeypatch.setattr("time.monotonic", lambda now=number * takes_s: now)
        heartbeat.beat(None, number)
        newest, word, first, *_ = path.read_text().split()
        assert (word, first) == ("update", "1")
        if int(newest) != seen[-1]:
            seen.append(int(newest))
    assert seen[1:] == [*range(1, 33), *written]


def test_the_last_update_is_written_at_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "heartbeat"
    heartbeat = heartbeats.HeartbeatFile(str(path))
    monkeypatch.setattr(heartbeats.HeartbeatFile, "_EVERY_S", 3600)
    monkeypatch.setattr(updates, "_count", 39)
    for number in range(1, 40):
        heartbeat.beat(None, number)
    assert path.read_text().startswith("32 update ")
    heartbeat.flush()
    assert path.read_text().startswith("39 update ")


def test_a_heartbeat_that_cannot_be_written_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heartbeat = heartbeats.HeartbeatFile(str(tmp_path / "missing" / "heartbeat"))
    for number in (1, 2, 3):
        heartbeat.beat(None, number)
    assert capsys.readouterr().err.count("fleetrun: the heartbeat cannot be written: ") == 1
