"""Findings about a host's disk space, limits and clock: each one, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from findings import bad
from hypothesis import given
from hypothesis import strategies as st

from fleetrun.doctor import machine
from fleetrun.doctor.facts import CgroupLimits, ClockOffset, Machine, ResourceLimits, Room
from fleetrun.doctor.findings import ERROR, OK, WARNING, Finding

GIB = 1 << 30
ROOM = Room("/dev/shm", 16 * GIB, 16 * GIB, 1 << 20)
LIMITS = ResourceLimits(
    (65536, 65536), (None, None), (None, None), (None, None), 100, is_root=False
)
GROUP = CgroupLimits(None, 0, None, None, 0, 0)
WELL = Machine(
    shm=ROOM,
    logs=ROOM._replace(path="/work/log"),
    limits=LIMITS,
    group=GROUP,
    clock=ClockOffset(0.0, "/work/log", is_synchronised=True),
    cpus=16,
    memory_bytes=64 * GIB,
    libgomp="",
)


def judged(
    facts: Machine, *, ranks: int = 4, has_peers: bool = False, has_rdma: bool = False
) -> list[Finding]:
    return list(machine.judge(facts, ranks=ranks, has_peers=has_peers, has_rdma=has_rdma))


def test_a_host_that_is_well_has_nothing_to_mend() -> None:
    findings = judged(WELL, has_peers=True, has_rdma=True)
    assert bad(findings) == []
    assert not any(finding.fix or finding.means for finding in findings)


@pytest.mark.parametrize(
    ("changed", "check", "level"),
    [
        ({"shm": ROOM._replace(free=0)}, "shared memory", ERROR),
        ({"shm": ROOM._replace(total=64 << 20, free=64 << 20)}, "shared memory", WARNING),
        ({"shm": ROOM._replace(refusal="Read-only file system")}, "shared memory", ERROR),
        ({"logs": ROOM._replace(refusal="No space left on device")}, "disk for logs", ERROR),
        ({"logs": ROOM._replace(free=1 << 20)}, "disk for logs", ERROR),
        ({"logs": ROOM._replace(free=100 << 20)}, "disk for logs", WARNING),
        ({"logs": ROOM._replace(inodes=3)}, "disk for logs", WARNING),
        ({"libgomp": "libgomp.so.1: cannot open shared object file"}, "OpenMP", ERROR),
        ({"limits": LIMITS._replace(open_files=(64, 65536))}, "open files", WARNING),
        ({"limits": LIMITS._replace(open_files=(256, 256))}, "open files", ERROR),
        ({"limits": LIMITS._replace(processes=(200, None))}, "processes", WARNING),
        ({"limits": LIMITS._replace(virtual_bytes=(GIB, GIB))}, "address space", WARNING),
        ({"group": GROUP._replace(processes=100, processes_used=90)}, "processes", WARNING),
        ({"group": GROUP._replace(memory_bytes=GIB, memory_used=GIB)}, "memory", WARNING),
        ({"group": GROUP._replace(memory_bytes=64 * GIB, kills=2)}, "memory", WARNING),
        ({"memory_bytes": GIB}, "memory", WARNING),
        ({"group": GROUP._replace(cpus=1.5)}, "CPUs", WARNING),
        ({"cpus": 2}, "CPUs", WARNING),
        ({"clock": ClockOffset(-7.5, "/work/log", is_synchronised=True)}, "clock", WARNING),
    ],
)
def test_what_is_not_well_is_the_one_finding(
    changed: dict[str, Any], check: str, level: str
) -> None:
    assert bad(judged(WELL._replace(**changed))) == [(check, level)]


def test_root_is_not_held_by_the_limit_of_processes() -> None:
    limits = LIMITS._replace(processes=(200, 200), is_root=True)
    assert bad(judged(WELL._replace(limits=limits))) == []


def test_locked_memory_matters_only_with_infiniband() -> None:
    tight = WELL._replace(limits=LIMITS._replace(locked_bytes=(65536, 65536)))
    assert bad(judged(tight)) == []
    assert bad(judged(tight, has_rdma=True)) == [("locked memory", WARNING)]


def test_an_undisciplined_clock_matters_only_with_other_hosts() -> None:
    free = WELL._replace(clock=ClockOffset(0.0, "/work/log", is_synchronised=False))
    assert bad(judged(free)) == []
    assert bad(judged(free, has_peers=True)) == [("clock", WARNING)]


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50), st.integers(1, 4096))
def test_less_room_is_never_judged_better(free: int, less: int, ranks: int) -> None:
    order = {OK: 0, WARNING: 1, ERROR: 2}

    def worst(room: int) -> int:
        shm = ROOM._replace(total=1 << 50, free=room)
        findings = judged(WELL._replace(shm=shm, logs=shm), ranks=ranks)
        return max(order[finding.level] for finding in findings if finding.check != "CPUs")

    assert worst(min(free, less)) >= worst(max(free, less))
