"""The logs of a job by ssh, as its first host sends them and the head keeps them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from typing import TYPE_CHECKING

import pytest

from fleetrun.remote import logs, ssh
from fleetrun.rundir import lockfile

if TYPE_CHECKING:
    from pathlib import Path

RUN = "20260101T000000Z-job-7"
MARK = ssh.MARK + b"7\n"


def a_run(folder: Path) -> Path:
    """Make the log folder of a job that has ended."""
    run = folder / "log" / "runs" / RUN
    (run / "gathered").mkdir(parents=True)
    (run / "events.jsonl").write_text(json.dumps({"launcher_pid": 7}) + "\n")
    (run / "workerlog.0").write_bytes(b"x" * 100_000)
    (run / "gathered" / "workerlog.1").write_text("other\n")
    (run / "lock").write_text("mark")
    (run / "gathered" / "workerlog.2").symlink_to("/etc/passwd")
    (sibling := folder / "log" / "runs" / f"{RUN}8").mkdir()
    (sibling / "workerlog.0").write_text("of another job\n")
    (run / "gathered" / "workerlog.3").symlink_to(sibling / "workerlog.0")
    (folder / "log" / "latest").symlink_to(f"runs/{RUN}")
    return run


def sent(folder: Path, pid: int = 7) -> bytes:
    """Return what the first host sends of the launcher PID in FOLDER."""
    output = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(output):
        logs.send(str(folder / "log"), pid)
    assert isinstance(output.buffer, io.BytesIO)
    return output.buffer.getvalue()


def fetched(folder: Path, data: bytes) -> str:
    """Fetch DATA, which a login shell greets before, into the log folder of FOLDER."""
    (folder / "data").write_bytes(b"Welcome!\n" + MARK + data)
    return logs.fetch(["cat", str(folder / "data")], b"", str(folder / "log"))


def test_logs_arrive_as_if_the_job_had_run_here(tmp_path: Path) -> None:
    a_run(tmp_path)
    (here := tmp_path / "here").mkdir()
    assert fetched(here, sent(tmp_path)) == f"The logs are in {here}/log/runs/{RUN}."
    assert (here / "log" / "workerlog.0").read_bytes() == b"x" * 100_000
    assert (here / "log" / "workerlog.1").read_text() == "other\n"
    assert os.readlink(here / "log" / "latest") == f"runs/{RUN}"
    # What lies outside of the run stays there.
    assert not (here / "log" / "workerlog.2").exists()
    assert not (here / "log" / "workerlog.3").exists()
    assert lockfile.launcher_of(str(here / "log/runs" / RUN))


def test_a_folder_that_both_share_is_left_alone(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert fetched(tmp_path, sent(tmp_path)) == f"The logs are in {tmp_path}/log/runs/{RUN}."
    assert (run / "lock").read_text() == "mark"


def test_logs_of_another_launcher_are_not_this_jobs(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert sent(tmp_path, pid=8) == sent(tmp_path / "nowhere") == b""


def test_logs_that_break_off_are_said_to(tmp_path: Path) -> None:
    (there := tmp_path / "there").mkdir()
    a_run(there)
    message = fetched(tmp_path, sent(there)[:5000])
    assert message.startswith(f"Not all logs could be fetched to {tmp_path}/log/runs/{RUN} (")
    assert fetched(tmp_path, b"").startswith("The logs could not be fetched from the first host (")


@pytest.mark.parametrize("name", ["../x", "a/../b", "/etc/x", f"{RUN}/gathered/../x", f"{RUN}/./x"])
def test_files_arrive_only_in_the_run(tmp_path: Path, name: str) -> None:
    with tarfile.open(fileobj=(data := io.BytesIO()), mode="w|") as tar:
        tar.addfile(tarfile.TarInfo(name))
    assert fetched(tmp_path, data.getvalue()).startswith("The logs could not be fetched")
    assert os.listdir(tmp_path / "log") == []
