"""Findings about a host's disk space, limits and control groups, from real and fake files."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from checkout import environ
from findings import bad

from fleetrun.doctor import machine
from fleetrun.doctor.findings import ERROR, OK, WARNING
from fleetrun.doctor.machine import ControlGroup

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def put(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path


def test_all_checks_have_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet" / "there"
    findings = list(machine.check(str(folder), ranks=1, has_peers=False, has_rdma=False))
    bad(findings)
    names = [finding.check for finding in findings if finding.check != "address space"]
    assert names == [
        *("shared memory", "disk for logs", "OpenMP", "open files", "processes", "memory"),
        *("CPUs", "clock"),
    ]
    assert str(tmp_path) in findings[1].seen
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_says_why() -> None:
    findings = list(machine.check("/proc/nowhere", ranks=1, has_peers=False, has_rdma=False))
    assert findings[1].level == ERROR
    assert findings[1].seen.startswith("/proc cannot be written (")


def test_a_library_that_is_not_there_says_why() -> None:
    finding = machine.openmp("libnone.so.1")
    assert (finding.check, finding.level) == ("OpenMP", ERROR)
    assert "cannot open shared object file" in finding.seen


@pytest.mark.parametrize(
    ("limit", "check", "level"),
    [
        ("-Sn 64", "open_files(4)", WARNING),
        ("-n 256", "open_files(4)", ERROR),
        ("-v 8000000", "next(machine.memory_limits(has_rdma=False))", WARNING),
        ("-l 64", "next(machine.memory_limits(has_rdma=True))", WARNING),
        ("-l 64", "len(list(machine.memory_limits(has_rdma=False)))", "0"),
    ],
)
def test_limits_are_those_that_ranks_inherit(limit: str, check: str, level: str) -> None:
    call = check if "machine." in check else f"machine.{check}"
    code = f"from fleetrun.doctor import machine; found = {call}; "
    code += "print(getattr(found, 'level', found))"
    done = subprocess.run(
        ["sh", "-c", f'ulimit {limit}; exec "$0" -c "$1"', sys.executable, code],
        env=environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{level}\n"


@pytest.mark.parametrize(
    ("group", "ranks", "check"),
    [
        (ControlGroup(processes=100, processes_used=90), 1, machine.processes),
        (ControlGroup(memory=GIB, memory_used=GIB), 1, machine.memory),
        (ControlGroup(memory=64 * GIB, kills=2), 1, machine.memory),
        (ControlGroup(), 1 << 20, machine.memory),
        (ControlGroup(cpus=0.5), 1, machine.cpus),
        (ControlGroup(), 1 << 20, machine.cpus),
    ],
)
def test_what_is_not_enough_is_a_warning(group: ControlGroup, ranks: int, check: object) -> None:
    assert callable(check)
    assert [level for _, level in bad([check(ranks, group)])] == [WARNING]


def test_enough_is_enough() -> None:
    group = ControlGroup(64 * GIB, 0, 64.0, 100_000, 5)
    assert machine.processes(4, group).level == OK
    assert machine.memory(4, group).level == OK


def test_the_tightest_limit_of_version_2_counts(root: Path) -> None:
    (root / "proc" / "self" / "cgroup").write_text("0::/job/step\n")
    top = root / "sys" / "fs" / "cgroup"
    put(top, memory__max="max", cpu__max="max 100000", pids__max="max")
    put(
        top / "job",
        memory__max="1000000",
        memory__current="900000",
        cpu__max="150000 100000",
        pids__max="500",
        pids__current="490",
        memory__events="low 0\noom 2\noom_kill 2",
    )
    put(top / "job" / "step", memory__max="2000000", memory__current="5", cpu__max="max 100000")
    assert machine.control_group(str(root)) == ControlGroup(1000000, 900000, 1.5, 500, 490, 2)


def test_limits_of_version_1_count(root: Path) -> None:
    (root / "proc" / "self" / "cgroup").write_text("4:memory:/outside\n3:cpu,cpuacct:/outside\n")
    top = root / "sys" / "fs" / "cgroup"
    # In a container the path is the one outside, and the top is ours.
    put(top / "memory", memory__limit_in_bytes="1000", memory__usage_in_bytes="10")
    put(top / "memory", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1")
    put(top / "cpu,cpuacct", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    assert machine.control_group(str(root)) == ControlGroup(1000, 10, 0.5, kills=1)


def test_without_limits_there_are_none(root: Path) -> None:
    (root / "proc" / "self" / "cgroup").write_text("4:memory:/\n")
    put(root / "sys" / "fs" / "cgroup" / "memory", memory__limit_in_bytes="9223372036854771712")
    assert machine.control_group(str(root)) == ControlGroup()
