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


def test_the_log_is_as_if_nobody_had_looked(tmp_path: Path) -> None:
    job = Command.python(tmp_path, "def f(): 1 / 0\nf()", ranks=1)
    job.run()
    script = job.argv[-1]
    assert job.log(0).read_text() == (
        f'Traceback (most recent call last):\n  File "{script}", line 4, in <module>\n    f()\n'
        f'  File "{script}", line 3, in f\n    def f(): 1 / 0\n             ~~^~~\n'
        "ZeroDivisionError: division by zero\n"
    ) or sys.version_info[:2] not in {(3, 11), (3, 12)}


def test_s30_of_a_wrapper_script_the_python_in_it_counts(tmp_path: Path) -> None:
    script = f'"{sys.executable}" -c "import nowhere" || exit 5'
    job = Command(tmp_path, script, ranks=1)
    assert job.run().code == 5
    recorded = error(job)
    assert recorded is not None
    assert recorded.class_ == "ModuleNotFoundError"


def test_what_ends_a_child_of_the_rank_is_not_the_ranks_end(tmp_path: Path) -> None:
    code = """
import multiprocessing, subprocess
def fail(): raise ValueError("in a child")
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=fail)
        child.start()
        child.join()
    subprocess.run([sys.executable, "-c", "raise OSError"])
    if not os.fork():
        raise KeyError("forked")
    os.wait()
    sys.exit(3)
"""
    job = Command.python(tmp_path, code, ranks=1)
    assert job.run().code == 3
    assert "in a child" in job.log(0).read_text()
    assert error(job) is None


def test_an_exit_or_a_ctrl_c_is_no_error(tmp_path: Path) -> None:
    for code in ("sys.exit('bad')", "raise KeyboardInterrupt"):
        job = Command.python(tmp_path, code, ranks=1)
        assert job.run().code in {1, 130}
        assert error(job) is None


def test_s15_a_crash_shows_the_python_stack(tmp_path: Path) -> None:
    code = "import signal\ndef crash(): os.kill(os.getpid(), signal.SIGSEGV)\ncrash()"
    job = Command.python(tmp_path, code, ranks=1)
    assert job.run().code == 139
    assert "in crash" in job.log(0).read_text()
