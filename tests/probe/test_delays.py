"""The kernel's counts of what keeps a process from running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from fleetrun.probe import delays

GROUPS = Path("/sys/fs/cgroup/cpu")
SPIN = "while True: pass"
STAT = "cpu  9 9 9 9 9 9 9 700 0 0\ncpu0 1 1 1 1 1 1 1 {} 0 0\ncpu1 1 1 1 1 1 1 1 {} 0 0\nintr 5\n"


def test_two_processes_on_one_processor_wait_for_it() -> None:
    number = min(os.sched_getaffinity(0))
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-S",
                "-c",
                f"import os; os.sched_setaffinity(0, {{{number}}})\n{SPIN}",
            ]
        )
        for _ in range(2)
    ]
    until(lambda: {delays.of(child.pid, {}).processors for child in children} == {str(number)})
    until(lambda: all((delays.of(child.pid, {}).queued_s or 0.0) > 0.1 for child in children))
    assert all(delays.of(child.pid, {}).main_s for child in children)
    for child in children:
        child.kill()
        child.wait()


@pytest.mark.skipif(
    not os.access(GROUPS, os.W_OK) or not (GROUPS / "cpu.cfs_quota_us").exists(),
    reason="no control group of processors can be made here",
)
def test_a_limit_of_the_control_group_holds_a_process_back() -> None:
    group = GROUPS / f"fleetrun-test-{os.getpid()}"
    group.mkdir()
    child = subprocess.Popen([sys.executable, "-S", "-c", SPIN])
    try:
        (group / "cpu.cfs_quota_us").write_text("2000")
        (group / "cgroup.procs").write_text(str(child.pid))
        until(lambda: delays.of(child.pid, {}).throttled_s > 0.2)
        assert delays.of(os.getpid(), {}).throttled_s < delays.of(child.pid, {}).throttled_s
    finally:
        child.kill()
        child.wait()
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root folder with process 7, in version 2 of control groups."""
    process = tmp_path / "proc/7/task/7"
    process.mkdir(parents=True)
    (process / "schedstat").write_text("1500000000 250000000 99\n")
    (process / "stat").write_text("7 (a (b) c) S 1 7 7 0 -1 64 900 0 42 0 150 25 0 0\n")
    (tmp_path / "proc/7/status").write_text("Name:\tx\nCpus_allowed_list:\t0-1,8\n")
    (tmp_path / "proc/7/cgroup").write_text("0::/job/rank\n")
    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "proc/stat").write_text(STAT.format(2 * ticks, 4 * ticks))
    for folder, seconds in (("job/rank", 0.5), ("job", 0.25)):
        where = tmp_path / "sys/fs/cgroup" / folder
        where.mkdir(parents=True, exist_ok=True)
        (where / "cpu.stat").write_text(f"nr_throttled 5\nthrottled_usec {int(seconds * 1e6)}\n")
    return tmp_path


def test_limits_of_outer_groups_and_stolen_time_count(root: Path) -> None:
    stolen = delays.stolen(str(root))
    assert stolen == {0: 2.0, 1: 4.0}
    assert delays.of(7, stolen, str(root)) == delays.Delays(*(1.5, 0.25, 0.75, 3.0, "0-1,8", 42))


def test_of_a_process_that_is_gone_nothing_is_known(root: Path) -> None:
    assert delays.of(8, {0: 1.0}, str(root)) == delays.Delays(*(None, None, 0.0, None, "", None))
