"""--redirects: standard output and standard error of ranks in separate files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from commandline import Command, fleetrun

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

BOTH = """
print("out", rank, flush=True)
print("err", rank, file=sys.stderr, flush=True)
"""


def shown(folder: Path, *words: str) -> str:
    done = fleetrun("logs", *words, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_each_stream_has_a_file_of_its_own(tmp_path: Path) -> None:
    done = Command.python(tmp_path, BOTH, "--redirects", "--tee=all").run()
    assert (done.code, done.stderr) == (0, "")
    log = tmp_path / "log"
    for rank in range(2):
        assert (log / f"workerlog.{rank}").read_text() == f"out {rank}\n"
        assert (log / f"workererr.{rank}").read_text() == f"err {rank}\n"
    lines = [f"[rank {rank}{of}] {what} {rank}" for rank in range(2) for of, what in STREAMS]
    assert sorted(done.out.decode().splitlines()) == sorted(lines)
    assert sorted(shown(tmp_path).splitlines()) == sorted(lines)
    # Both streams of a single rank, without a prefix.
    assert sorted(shown(tmp_path, "--rank=1").splitlines()) == ["err 1", "out 1"]
    plan = json.loads((log / "latest/plan.json").read_text())
    assert [process["error_log"] for process in plan["processes"]] == ["workererr.0", "workererr.1"]
    # A launch without the option leaves no link to an older one.
    assert Command.python(tmp_path, BOTH).run().code == 0
    assert not list(log.glob("workererr.*"))
    assert sorted((log / "workerlog.0").read_text().splitlines()) == ["err 0", "out 0"]


STREAMS = (("", "out"), (" stderr", "err"))


def test_the_report_quotes_what_stands_in_the_file_of_standard_error(tmp_path: Path) -> None:
    code = """
print("step 1", flush=True)
if rank == 1: raise MemoryError("CUDA error 2, out of memory")
"""
    done = Command.python(tmp_path, code, "--redirects").run()
    assert done.code == 1
    assert "workererr.1, which ends with\n" in done.stderr
    assert "    MemoryError: CUDA error 2, out of memory" in done.stderr
    report = json.loads((tmp_path / "log/latest/report.json").read_text())
    assert report["culprit"]["log"].endswith("/workererr.1")
    assert report["culprit"]["last_words"][-1] == "MemoryError: CUDA error 2, out of memory"
    assert "Traceback" not in (tmp_path / "log/workerlog.1").read_text()


def test_attempts_have_both_files_and_long_ones_are_cut(tmp_path: Path) -> None:
    code = """
print("attempt", os.environ["PADDLE_RESTART_COUNT"], flush=True)
if os.environ["PADDLE_RESTART_COUNT"] == "0":
    sys.exit("again")
rotated = f"{os.environ['FLEETRUN_RUN_DIR']}/workererr.0.attempt1.1"
line = b"x" * 1023 + b"\\n"
count = 0
while not os.path.exists(rotated):
    os.write(2, line)
    count += 1
    time.sleep(0.0001)
open("count", "w").write(str(count))
"""
    options = ["--redirects", "--max_restart=1", "--log_max_size=1M"]
    done = Command.python(tmp_path, code, *options, ranks=1).run()
    assert done.code == 0, done.stderr
    run = (tmp_path / "log/latest").resolve()
    assert (run / "workererr.0").read_text() == "again\n"
    assert (run / "workerlog.0.attempt1").read_text() == "attempt 1\n"
    assert (tmp_path / "log/workererr.0").resolve() == run / "workererr.0.attempt1"
    count = int((tmp_path / "count").read_text())
    # What is written in the microseconds of a cut is lost.
    assert count / 2 < done.out.count(b"x" * 1023) <= count
