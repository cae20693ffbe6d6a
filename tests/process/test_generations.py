"""Real jobs that start again with other ranks, and with hosts that come late or never."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from commandline import Driven

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = pytest.mark.extended


def sh(*lines: str) -> list[list[str]]:
    return [["sh", "-c", line] for line in lines]


def waiting(
    folder: Path, how: str, attempt: int, **wanted: object
) -> tuple[Driven, subprocess.Popen[bytes]]:
    """Start a job whose ATTEMPT must wait for a host."""
    os.mkfifo(folder / "hosts")
    launch = Driven(
        folder,
        generations=[sh("exit 3"), sh("echo trained")] if attempt else [sh("echo trained")],
        gathering=how,
        gathering_from=attempt,
        max_restarts=1,
        backoff_s=0.01,
        **wanted,
    )
    process = launch.start()
    launch.wait_for(f"gathering.{attempt}")
    return launch, process


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_host_that_comes_later_is_waited_for(tmp_path: Path, attempt: int) -> None:
    job, process = waiting(tmp_path, "later", attempt)
    with (tmp_path / "hosts").open("wb") as host:
        host.write(b"!")
        host.flush()
        done = job.finish(process)
    assert (done.code, done.out) == (0, b"trained\n"), done.stderr
    assert not (tmp_path / "cancelled").exists()
