"""Disk space, limits and control groups for a check-up, from real and fake files."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fleetrun.probe.health import machine

if TYPE_CHECKING:
    from pathlib import Path


def test_this_host_is_read(tmp_path: Path) -> None:
    here = machine.read(str(tmp_path / "not" / "yet" / "there"))
    assert here.logs.path == str(tmp_path)
    assert here.logs.refusal == ""
    assert here.shm.total >= here.shm.free
    assert here.limits.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert here.limits.threads >= 1
    assert here.cpus >= 1
    assert here.clock.other == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_says_why() -> None:
    health = machine.read("/proc/nowhere")
    assert health.logs.path == "/proc"
    assert health.logs.refusal
    assert health.clock.other == ""


def test_a_library_that_is_not_there_says_why() -> None:
    def load(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    assert machine.libgomp(load) == "libgomp.so.1: cannot open shared object file"


def put(folder: Path, **texts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    return tmp_path


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
    limits = machine.group(str(root))
    assert (limits.memory_bytes, limits.memory_used) == (1000000, 900000)
    assert limits.cpus == 1.5
    assert (limits.processes, limits.processes_used) == (500, 490)
    assert limits.kills == 2


def test_limits_of_version_1_count(root: Path) -> None:
    (root / "proc" / "self" / "cgroup").write_text("4:memory:/outside\n3:cpu,cpuacct:/outside\n")
    top = root / "sys" / "fs" / "cgroup"
    # In a container the path is the one outside, and the top is ours.
    put(top / "memory", memory__limit_in_bytes="1000", memory__usage_in_bytes="10")
    put(top / "memory", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1")
    put(top / "cpu,cpuacct", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    group = machine.group(str(root))
    assert (group.memory_bytes, group.memory_used, group.cpus) == (1000, 10, 0.5)
    assert group.kills == 1


def test_without_limits_there_are_none(root: Path) -> None:
    (root / "proc" / "self" / "cgroup").write_text("4:memory:/\n")
    put(
        root / "sys" / "fs" / "cgroup" / "memory",
        memory__limit_in_bytes="9223372036854771712",
    )
    group = machine.group(str(root))
    assert (group.memory_bytes, group.cpus, group.processes, group.kills) == (None, None, None, 0)


def test_limits_are_those_that_ranks_inherit() -> None:
    code = "from fleetrun.probe.health import machine; print(machine.limits().open_files[0])"
    done = subprocess.run(
        ["sh", "-c", f"ulimit -Sn 64; exec {sys.executable} -c '{code}'"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "64\n"
