"""The last line of a launch says how the job ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commandline import Command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended


def loud(job: Command) -> Command:
    """Run JOB without --quiet."""
    job.argv.remove("--quiet")
    return job


@pytest.mark.parametrize(
    ("code", "word"), [(0, "Done after"), (7, "Failed after")], ids=["done", "failed"]
)
def test_the_last_line_says_how_long_how_far_and_how_it_ended(
    code: int, word: str, tmp_path: Path
) -> None:
    script = f'echo 30 >"$FLEETRUN_HEARTBEAT"; exit {code}'
    ended = loud(Command(tmp_path, script, ranks=1)).run()
    assert ended.code == code
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"fleetrun: {word} ")
    assert last.endswith(f"and 30 steps (exit code {code}).")


def test_a_quiet_launch_has_no_last_line(tmp_path: Path) -> None:
    assert Command(tmp_path, "true").run().stderr == ""
