"""Real ranks when the source that watches them fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commandline import Driven

if TYPE_CHECKING:
    from pathlib import Path


def test_a_job_whose_session_fails_ends_with_a_sentence(tmp_path: Path) -> None:
    job = Driven(tmp_path, "touch break; exec sleep 600", "exec sleep 600", broken_source=True)
    done = job.run()
    assert done.code == 1
    assert (
        "The session with the other hosts failed (KeyError('no such message')), and the job "
        "cannot go on without it."
    ) in done.stderr
    (failed,) = [event for event in job.events() if event["event"] == "source_failed"]
    assert (failed["source"], failed["is_required"]) == ("the session with the other hosts", True)
    (last,) = [event for event in job.events() if event["event"] == "finished"]
    assert last["exit_code"] == 1
