"""A test that fails leaves nothing to those after it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONG_S

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
FAILING = """
import gc, subprocess, sys
from pathlib import Path
from commandline import Command

def test_that_fails(tmp_path):
    launcher = Command(tmp_path, "echo $$ > pid$R; sleep 100").start()
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert not child.pid

def test_after_it():
    sys.last_exc = sys.last_value = sys.last_traceback = None
    gc.collect()
"""


def outcome(folder: Path, tests: str) -> str:
    """Return what pytest prints of TESTS, a file that it runs in FOLDER."""
    (folder / "test_failing.py").write_text(tests, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-W", "error", folder],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_S,
    )
    return done.stdout + done.stderr


def test_what_a_failed_test_leaves_is_killed_and_nobody_elses_failure(tmp_path: Path) -> None:
    printed = outcome(tmp_path, FAILING)
    assert "1 failed, 1 passed" in printed
    assert "Error" not in printed.replace("AssertionError", "")
