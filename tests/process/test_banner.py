"""The banner before a script's first line, and the file with the rest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from commandline import Command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended

ARGUMENTS = "Settings\n"
ENVIRONMENT = "Environment of every process"


def launched(folder: Path, *options: str, script: str = "echo first") -> tuple[list[str], str]:
    """Return the standard error of a launch, and its launch.txt."""
    job = Command(folder, script, *options)
    if "--quiet" not in options:
        job.argv.remove("--quiet")
    done = job.run()
    assert (done.code, done.out) == (0, b"first\n")
    return done.stderr.splitlines(), (folder / "log" / "latest" / "launch.txt").read_text()


def test_at_most_five_lines_stand_before_the_scripts_first(tmp_path: Path) -> None:
    shown, kept = launched(tmp_path, "--env=MY_TOKEN=hush-hush", "--check_ranks=-1")
    *banner, note, end = shown
    assert end.startswith("fleetrun: Done after ")
    assert "no GPU driver" in note
    assert 3 <= len(banner) <= 5
    # No terminal shortens the path.
    assert str(tmp_path) in banner[0]
    assert all(line.startswith("fleetrun: ") for line in banner)
    assert banner[0].endswith(" on this host: ranks 0-1 of 2")
    assert ARGUMENTS in kept
    assert ENVIRONMENT in kept
    assert "no GPU driver" in kept
    assert re.search(r"env.MY_TOKEN +\*\*\*  \(command line\)", kept)
    assert "hush-hush" not in kept


def test_the_tables_are_for_their_owner_alone(tmp_path: Path) -> None:
    launched(tmp_path)
    path = tmp_path / "log" / "latest" / "launch.txt"
    assert path.stat().st_mode & 0o777 == 0o600
