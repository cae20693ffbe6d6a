"""The logs of a job by ssh, as its first host sends them and the head keeps them."""

from __future__ import annotations

import contextlib
import io
import json
import os
from typing import TYPE_CHECKING

import pytest

from fleetrun.remote import logs, ssh
from fleetrun.rundir import lockfile, names

if TYPE_CHECKING:
    from pathlib import Path

RUN = "20260101T000000Z-job-7"
MARK = ssh.MARK + b"\n"


def a_run(folder: Path) -> Path:
    """Make the log folder of a job that has ended."""
    run = folder / "log" / "runs" / RUN
    (run / "gathered").mkdir(parents=True)
    (run / "events.jsonl").write_text(json.dumps({"launcher_pid": 7}) + "\n")
    (run / "workerlog.0").write_bytes(b"x" * 100_000)
    (run / "gathered" / "workerlog.1").write_text("other\n")
    (run / "lock").write_text("mark")
    (run / "gathered" / "workerlog.2").symlink_to("/etc/passwd")
    (folder / "log" / "latest").symlink_to(f"runs/{RUN}")
    return run


def sent(run: Path, *, is_all: bool) -> bytes:
    """Return what the first host sends of RUN."""
    output = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(output):
        logs.send(str(run), is_all=is_all)
    assert isinstance(output.buffer, io.BytesIO)
    return output.buffer.getvalue()


def fetched(folder: Path, data: bytes, run: str = RUN) -> str:
    """Fetch DATA, which a login shell greets before, into the log folder of FOLDER."""
    (folder / "data").write_bytes(b"Welcome!\n" + data)
    return logs.fetch(["cat", str(folder / "data")], b"", run, str(folder / "log"))


@pytest.mark.parametrize("is_all", [True, False])
def test_logs_arrive_as_if_the_job_had_run_here(tmp_path: Path, is_all: bool) -> None:
    run = a_run(tmp_path)
    assert logs.find(str(tmp_path / "log"), 7) == str(run)
    (here := tmp_path / "here").mkdir()
    message = fetched(here, MARK + sent(run, is_all=is_all))
    assert message == f"The logs are in {here}/log/runs/{RUN}."
    log = (here / "log" / "workerlog.0").read_bytes()
    end = b"x" * names.GATHERED_BYTES
    assert log == (b"x" * 100_000 if is_all else names.shortened(100_000, len(end)) + end)
    assert (here / "log" / "workerlog.1").read_text() == "other\n"
    assert os.readlink(here / "log" / "latest") == f"runs/{RUN}"
    # What lies outside of the run stays there.
    assert not (here / "log" / "workerlog.2").exists()
    assert lockfile.launcher_of(str(here / "log/runs" / RUN))


def test_a_folder_that_both_share_is_left_alone(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert fetched(tmp_path, b"") == f"The logs are in {tmp_path}/log/runs/{RUN}."
    assert (run / "lock").read_text() == "mark"


def test_logs_of_another_launcher_are_not_this_jobs(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert logs.find(str(tmp_path / "log"), 8) is None
    assert logs.find(str(tmp_path / "nowhere"), 7) is None


@pytest.mark.parametrize("kept", [0, 600, 3000])
def test_logs_that_break_off_are_said_to(tmp_path: Path, kept: int) -> None:
    (there := tmp_path / "there").mkdir()
    data = MARK + sent(a_run(there), is_all=True)
    message = fetched(tmp_path, data[:kept])
    assert (
        message
        == f"Not all logs could be fetched to {tmp_path}/log/runs/{RUN} (the connection has ended)."
    )


@pytest.mark.parametrize("name", ["../x", "a/b", ".", "/etc/x", "gathered/../x"])
def test_files_arrive_only_in_the_run(tmp_path: Path, name: str) -> None:
    import tarfile

    with tarfile.open(fileobj=(data := io.BytesIO()), mode="w|") as tar:
        tar.addfile(tarfile.TarInfo(name))
    assert fetched(tmp_path, MARK + data.getvalue()).startswith("Not all logs could be fetched")
    assert [path.name for path in (tmp_path / "log" / "runs" / RUN).iterdir()] == ["lock"]


def test_a_run_has_no_path(tmp_path: Path) -> None:
    assert fetched(tmp_path, MARK, "/").startswith("The logs could not be fetched")
