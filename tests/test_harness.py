"""A test that fails leaves nothing to those after it."""

from __future__ import annotations

import os
import re
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


# A wait in vain: for a file, and for the end of a process.
WAITING = """
import waiting
from commandline import Command

CODE = "print('so far', flush=True); open(f'came{rank}', 'w').close(); time.sleep(100)"

def start(folder):
    return Command.python(folder, CODE).start_until("came0", "came1")

def test_for_a_file(tmp_path):
    launcher = start(tmp_path)
    waiting.until((tmp_path / "never").exists, 0.1)

def test_for_an_end(tmp_path):
    launcher = start(tmp_path)
    waiting.LONG_S = 0.1
    launcher.wait(0.1)
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


def test_a_wait_in_vain_shows_what_each_process_waits_for(tmp_path: Path) -> None:
    printed = outcome(tmp_path, WAITING)
    assert "2 failed" in printed
    for_a_file, for_an_end = printed.split("_ test_for_an_end _", 1)
    for test in (for_a_file, for_an_end):
        # Where the kernel does not say it of others, there is no name of the wait.
        kind = r"rank 1: .*python.*script-\w+.py\n  state S, threads: 1 in (\w*sleep|\?)"
        assert re.search(kind, test)
        assert test.count(", line 3 in <module>") == test.count("    so far\n") == 2
