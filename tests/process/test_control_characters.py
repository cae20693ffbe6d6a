"""No text of a file, a rank or another host can control the reader's terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from checkout import ROOT
from commandline import Command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended

# Clears the screen; sets a title; C1's CSI; right to left; fakes a line of another rank.
EVIL = "\x1b[2J \x1b]0;title\x07 \x9b31m \u202egnp \x7f\x08"
FORGED = "\nfleetrun: all is well"


def assert_harmless(output: bytes) -> None:
    """Fail if SAID has anything but lines of text."""
    for line in output.decode().split("\n"):
        assert line.isprintable(), line


def fleetrun(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "fleetrun", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        (f"--nproc_per_node={EVIL}{FORGED}", "train.py"),
        (f"--{EVIL}{FORGED}=1", "train.py"),
        (f"no{EVIL}{FORGED}.py",),
        (f"--config={EVIL}{FORGED}", "train.py"),
        (f"--strategy={EVIL}{FORGED}", "train.py"),
        ("strategy", "validate", f"{EVIL}{FORGED}"),
        ("strategy", "show", f"{EVIL}{FORGED}"),
    ],
)
def test_an_error_shows_what_it_quotes_as_text(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = fleetrun(tmp_path, *words)
    assert done.returncode in {2, 3}
    assert_harmless(done.stderr)
    assert b"\nfleetrun: all is well" not in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_report_shows_an_exception_as_text_and_the_console_the_rank_as_it_is(
    tmp_path: Path,
) -> None:
    # The failing rank ends the other, so it waits until that has printed.
    code = f"""
print({EVIL!r}, flush=True)
open(f"said{{rank}}", "w").close()
while not os.path.exists("said0"): time.sleep(0.01)
if rank == 1: raise ValueError({EVIL + FORGED!r})
time.sleep(60)
"""
    done = Command.python(tmp_path, code).run()
    assert done.code == 1
    assert "\\x1b[2J" in done.stderr
    assert_harmless(done.stderr.encode())
    assert EVIL.encode() in done.out
