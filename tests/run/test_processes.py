"""Files that ranks need exist, and are writable, before any of them starts."""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path

import pytest
from plans import plan

from fleetrun.run import processes
from fleetrun.rundir import names
from fleetrun.rundir.folder import Folder

PLAN = plan()


def claim(path: Path, attempt: int = 0) -> None:
    """Claim the files of PLAN in the folder PATH."""
    made = PLAN._replace(run_dir=str(path), files={f"{path}/list": "a,b"})
    processes.claim(made, attempt, Folder(str(path)))


def test_the_files_of_a_plan_are_written_and_its_logs_are_there(tmp_path: Path) -> None:
    claim(tmp_path)
    claim(tmp_path, 1)
    logs = [
        names.log_name(process.log, attempt) for process in PLAN.processes for attempt in (0, 1)
    ]
    assert sorted(os.listdir(tmp_path)) == sorted(["list", *logs])
    assert (tmp_path / "list").read_text() == "a,b"
    assert stat.S_IMODE((tmp_path / "list").stat().st_mode) == 0o600
    for log in logs:
        assert (tmp_path / log).read_bytes() == b""


def test_a_log_that_takes_no_words_is_an_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Like a full disk, or a quota.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            claim(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / PLAN.processes[0].log).read_bytes() == b""


def test_each_process_has_the_environment_that_its_spec_says() -> None:
    base = {b"PATH": b"/bin", b"OLD": b"1", b"JOB": b"outer"}
    spec = PLAN.processes[0]._replace(env={"A": "\udcff", "JOB": "own"}, unset=("OLD",))
    env = processes.environment(base, spec, "marker")
    assert env == {b"PATH": b"/bin", b"A": b"\xff", b"JOB": b"own", b"FLEETRUN_JOB": b"marker"}
