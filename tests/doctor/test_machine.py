"""Findings about a host's disk space, limits and control groups, from real and fake files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from checkout import environ
from findings import bad
from plans import a_request

from fleetrun.doctor import machine
from fleetrun.doctor.checked_job import CheckedJob
from fleetrun.doctor.findings import ERROR, OK, WARNING, Finding
from fleetrun.doctor.machine import ControlGroup

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
JOB = CheckedJob(a_request(), {})
Check = Callable[[CheckedJob, str], Iterator[Finding]]


def put(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/job/step\n")
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "check", "levels"),
    [
        ("-Sn 64", "open_files(job)", [WARNING]),
        ("-n 256", "open_files(job)", [ERROR]),
    ],
)
def test_limits_are_those_that_ranks_inherit(limit: str, check: str, levels: list[str]) -> None:
    code = (
        "from fleetrun.doctor import machine\nfrom fleetrun.doctor.checked_job import CheckedJob\n"
        "from fleetrun.model import Request, Script\n"
        "job = CheckedJob(Request(Script('file', 'train.py', ())), {})\n"
        f"print([finding.level for finding in machine.{check}])"
    )
    done = subprocess.run(
        ["sh", "-c", f'ulimit {limit}; exec "$0" -c "$1"', sys.executable, code],
        env=environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{levels}\n"


@pytest.mark.parametrize(
    ("files", "check", "level"),
    [
        ({"pids__max": "100", "pids__current": "90"}, machine.processes, WARNING),
        ({"pids__max": "100000", "pids__current": "5"}, machine.processes, OK),
        ({"memory__max": str(GIB), "memory__current": str(GIB)}, machine.memory, WARNING),
        ({"memory__max": str(64 * GIB)}, machine.memory, OK),
    ],
)
def test_what_is_not_enough_is_a_warning(
    root: Path, files: dict[str, str], check: Check, level: str
) -> None:
    put(root / "sys/fs/cgroup/job/step", **files)
    (finding,) = check(JOB, str(root))
    bad([finding])
    assert finding.level == level


@pytest.mark.parametrize(
    ("cgroup", "folders", "expected"),
    [
        # The tightest limit of version 2 counts.
        (
            "0::/job/step",
            {
                "": {"memory__max": "max", "pids__max": "max"},
                "job": {
                    "memory__max": "1000000",
                    "memory__current": "900000",
                    "pids__max": "500",
                    "pids__current": "490",
                },
                "job/step": {
                    "memory__max": "2000000",
                    "memory__current": "5",
                },
            },
            ControlGroup(1000000, 900000, 500, 490),
        ),
        # In a container the path of version 1 is the one outside, and the top is ours.
        (
            "4:memory:/outside",
            {
                "memory": {
                    "memory__limit_in_bytes": "1000",
                    "memory__usage_in_bytes": "10",
                },
            },
            ControlGroup(1000, 10),
        ),
    ],
)
def test_limits_of_control_groups_are_read(
    root: Path, cgroup: str, folders: dict[str, dict[str, Any]], expected: ControlGroup
) -> None:
    (root / "proc" / "self" / "cgroup").write_text(f"{cgroup}\n")
    for folder, files in folders.items():
        put(root / "sys" / "fs" / "cgroup" / folder, **files)
    assert machine.control_group(str(root)) == expected


def test_logs_that_may_not_be_written_are_not_taken_for_a_full_disk() -> None:
    # Not even root creates files there.
    (finding,) = machine.logs(CheckedJob(a_request(log_dir="/sys/log"), {}))
    assert bad([finding]) == [("disk for logs", ERROR)]
    assert finding.seen.startswith("/sys cannot be written (")
    assert finding.means == "a launch ends with 3"
    assert finding.fix == "chmod u+w /sys  # or give another --log_dir"
