"""A Python rank that dies of an exception records it, without side effects."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest
from commandline import Command

from fleetrun.rundir import rankfile

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.extended

ONCE = "time.sleep(30) if rank else None\n"


def error(job: Command, rank: int = 0) -> rankfile.ErrorReport | None:
    return rankfile.error(str(job.folder / "log" / "latest" / f"rank.{rank}.jsonl"))


def test_s20_an_exception_is_written_down_with_all_that_is_known(tmp_path: Path) -> None:
    job = Command.python(
        tmp_path, ONCE + "def load():\n    raise ValueError('a\\nb \\udce9')\nload()"
    )
    assert job.run().code == 1
    record = error(job)
    assert record is not None
    (exited,) = [e for e in job.events() if e["event"] == "exited" and e["rank"] == 0]
    assert (record.rank, record.pid, record.restart) == (0, exited["pid"], 0)
    assert (record.class_, record.message) == ("ValueError", "a\nb \\udce9")
    assert record.host == os.uname().nodename
    assert record.time is not None
    assert abs(exited["time"] - record.time) < 5
    assert record.stack.startswith("Traceback (most recent call last):\n")
    assert "in load\n" in record.stack
    assert error(job, 1) is None


def test_s30_of_a_wrapper_script_the_python_in_it_counts(tmp_path: Path) -> None:
    script = f'"{sys.executable}" -c "import nowhere" || exit 5'
    job = Command(tmp_path, script, ranks=1)
    assert job.run().code == 5
    recorded = error(job)
    assert recorded is not None
    assert recorded.class_ == "ModuleNotFoundError"


def test_s15_a_crash_shows_the_python_stack(tmp_path: Path) -> None:
    code = "import signal\ndef crash(): os.kill(os.getpid(), signal.SIGSEGV)\ncrash()"
    job = Command.python(tmp_path, code, ranks=1)
    assert job.run().code == 139
    assert "in crash" in job.log(0).read_text()
