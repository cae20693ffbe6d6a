"""Files that ranks need exist, and are writable, before any of them starts."""

from __future__ import annotations

import errno
import os
import resource
import stat
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from plans import plan

from fleetrun.run import worker
from fleetrun.rundir import names
from fleetrun.rundir.folder import Folder

if TYPE_CHECKING:
    from fleetrun.model import ProcessSpec

PLAN = plan()


def claim(path: Path, attempt: int = 0) -> None:
    """Claim the files of PLAN in the folder PATH."""
    files, links = {f"{path}/list": "a,b"}, {f"{path}/lib.so": "/plug-ins/lib.so"}
    made = PLAN._replace(run_dir=str(path), files=files, links=links)
    with closing(worker.OpenLogs()) as logs:
        worker.claim(made, attempt, Folder(str(path)), logs)


def test_the_files_of_a_plan_are_written_and_its_logs_are_there(tmp_path: Path) -> None:
    claim(tmp_path)
    claim(tmp_path, 1)
    logs = [
        names.log_name(process.log, attempt) for process in PLAN.processes for attempt in (0, 1)
    ]
    assert sorted(os.listdir(tmp_path)) == sorted(["lib.so", "list", *logs])
    assert (tmp_path / "lib.so").readlink() == Path("/plug-ins/lib.so")
    assert (tmp_path / "list").read_text() == "a,b"
    assert stat.S_IMODE((tmp_path / "list").stat().st_mode) == 0o600
    for log in logs:
        assert (tmp_path / log).read_bytes() == b""


def test_a_log_is_opened_once_for_its_trial_and_its_process(tmp_path: Path) -> None:
    folder, log = Folder(str(tmp_path)), str(tmp_path / "workerlog.0")
    logs, before = worker.OpenLogs(), len(os.listdir("/proc/self/fd"))
    logs.claim(log, folder)
    logs.claim(str(tmp_path / "workerlog.1"), folder)
    # The folder and the two logs.
    assert len(os.listdir("/proc/self/fd")) == before + 3
    fd = logs.open(log, folder)
    assert len(os.listdir("/proc/self/fd")) == before + 3
    os.write(fd, b"said")
    os.close(fd)
    # A process that is started again in the same attempt.
    fd = logs.open(log, folder)
    os.write(fd, b" again")
    os.close(fd)
    logs.close()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert Path(log).read_text() == "said again"


def test_what_a_log_has_stays(tmp_path: Path) -> None:
    log = tmp_path / PLAN.processes[0].log
    log.write_text("before")
    claim(tmp_path)
    assert log.read_text() == "before"


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
    def spec(env: dict[str, str], unset: tuple[str, ...]) -> ProcessSpec:
        return PLAN.processes[0]._replace(env=env, unset=unset)

    base = {b"PATH": b"/bin", b"OLD": b"1", b"JOB": b"outer"}
    alike = {"RANK": "0", "A": "\udcff", "JOB": "own"}
    specs = [
        spec(env=alike, unset=("OLD",)),
        spec(env={**alike, "RANK": "1", "JOB": "other"}, unset=("OLD",)),
        spec(env={**alike, "RANK": "2"}, unset=()),
        spec(env={"RANK": "3", "OLD": "2"}, unset=("OLD", "A")),
        spec(env=alike, unset=("OLD",)),
    ]
    made = worker.Environments(base, {"JOB": "marker"})
    common = {b"PATH": b"/bin", b"JOB": b"marker"}
    first = {**common, b"RANK": b"0", b"A": b"\xff"}
    wanted = [
        first,
        {**first, b"RANK": b"1"},
        {**first, b"RANK": b"2", b"OLD": b"1"},
        {**common, b"RANK": b"3", b"OLD": b"2"},
        first,
    ]
    for number, env in enumerate(wanted):
        got = made.of(specs[number])
        assert got == env
        # It belongs to the caller.
        got[b"RANK"] = b"spoilt"
