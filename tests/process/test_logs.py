"""Logs never harm a job: whatever happens to disks, folders and readers, training goes on."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from mounts import mounted
from waiting import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
# Two seconds of lines, and more where the launcher waits for a processor to rotate them.
LINES = """
count = 0
begin = time.monotonic()
rotated = f"{os.environ['FLEETRUN_RUN_DIR']}/workerlog.{rank}.1"
while time.monotonic() < begin + 2 or not os.path.exists(rotated):
    for _ in range(50):
        os.write(1, b"%d %09d %s\\n" % (rank, count, b"x" * (count % 500)))
        count += 1
    time.sleep(0.002)
open(f"count{rank}", "w").write(str(count))
"""


def are_whole_lines_of(part: bytes, text: bytes) -> bool:
    """Whether PART has lines of TEXT in order, none of them torn; those of a cut may be missing."""
    lines = iter(text.splitlines(keepends=True))
    return bool(part) and all(line in lines for line in part.splitlines(keepends=True))


def whole(job: Command, rank: int) -> bytes:
    """Join the parts of a rank's log."""
    log = job.log(rank).resolve()
    parts = sorted(log.parent.glob(f"{log.name}.*"), key=lambda part: -int(part.suffix[1:]))
    return b"".join(part.read_bytes() for part in parts) + log.read_bytes()


def expected(folder: Path, rank: int) -> bytes:
    count = int((folder / f"count{rank}").read_text())
    return b"".join(b"%d %09d %s\n" % (rank, i, b"x" * (i % 500)) for i in range(count))


@pytest.mark.parametrize("is_tmpfs", [False, pytest.param(True, marks=NEEDS_ROOT)])
def test_s68_no_line_is_torn_by_rotation(tmp_path: Path, *, is_tmpfs: bool) -> None:
    options = ["--log_max_size=1M", "--tee=all"]
    # So slow that three older parts hold all lines.
    job = Command.python(tmp_path, LINES.replace("0.002", "0.02"), *options)
    with mounted(tmp_path / "log", "tmpfs", "size=200m") if is_tmpfs else nullcontext():
        done = job.run()
        assert done.code == 0, done.stderr
        for rank in range(2):
            text = expected(tmp_path, rank)
            assert are_whole_lines_of(whole(job, rank), text)
            assert job.log(rank).resolve().with_name(f"workerlog.{rank}.1").exists()
            prefix = b"[rank %d] " % rank
            shown = [line for line in done.out.splitlines(keepends=True) if line.startswith(prefix)]
            assert are_whole_lines_of(b"".join(line.removeprefix(prefix) for line in shown), text)
    assert done.stderr == ""


def test_s68_a_stuck_reader_neither_blocks_ranks_nor_fills_the_disk(tmp_path: Path) -> None:
    job = Command.python(tmp_path, LINES, "--log_max_size=1M", ranks=1)
    launcher = job.start()
    # The pipe is not read until the rank has written everything.
    job.wait_for("count0")
    log = job.log(0).resolve()
    done = job.finish(launcher)
    assert done.code == 0
    text = expected(tmp_path, 0)
    assert are_whole_lines_of(whole(job, 0), text)
    kept = [log.name, *(f"{log.name}.{number}" for number in (1, 2, 3))]
    assert {path.name for path in log.parent.glob("workerlog.*")} <= {*kept}
    # Unread text that was rotated away is missing, which was reported once.


def test_s37_full_disks_under_both_streams_cost_nobody_anything(tmp_path: Path) -> None:
    job = Command(tmp_path, "echo a; sleep 0.2; echo b; touch done$R; exit 5", ranks=1)
    with open("/dev/full", "wb") as full:  # a device
        done = job.finish(job.start(stdout=full, stderr=full))
        assert done.code == 5
        (tmp_path / "done0").unlink()
        done = job.finish(job.start(stdout=full))
    assert done.code == 5
    assert (tmp_path / "done0").exists()
    assert done.stderr.count("standard output cannot be written (No space left on device)") == 1


def test_a_full_disk_is_named_where_a_rank_could_not_write_why(tmp_path: Path) -> None:
    with mounted(tmp_path / "log", "tmpfs", "size=1m"):
        done = Command.python(tmp_path, "print('x' * 2_000_000, flush=True)", ranks=1).run()
    assert done.code == 1
    assert "is full, so its last lines may be missing." in done.stderr


def vanish(folder: Path) -> None:
    """Remove FOLDER in one step: nobody can write into it while it is being emptied."""
    shutil.rmtree(folder.rename(folder.with_name("vanishing")))


def test_s52_a_log_folder_that_vanished_is_made_again_for_another_attempt(tmp_path: Path) -> None:
    script = "touch ready$R; [ -e go ] && exit 0; until [ -e go ]; do sleep 0.01; done; exit 5"
    job = Command(tmp_path, script, "--max_restart=1")
    launcher = job.start()
    until(lambda: any(event["event"] == "started" and event["rank"] == 1 for event in job.events()))
    job.wait_for("ready0", "ready1")
    vanish(tmp_path / "log")
    assert job.release(launcher).code == 0
