"""The system's facts about a death are read if possible, and never required."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from fleetrun.model import ExitStatus
from fleetrun.postmortem import kernelfacts
from fleetrun.postmortem.kernelfacts import Baseline
from fleetrun.run.events import Exited

if TYPE_CHECKING:
    from pathlib import Path

OOM = (
    b"3,9,5000000,-;Memory cgroup out of memory: Killed process 4711 (python) "
    b"total-vm:9kB, anon-rss:8kB\n SUBSYSTEM=x\n"
)


def killed(signum: int, *, pid: int = 4711) -> Exited:
    return Exited(1, "rank 1", ExitStatus(signum=signum), 10.0, pid, peak_bytes=3 * 1024**3)


def test_the_kernels_lines_about_a_process_are_found() -> None:
    other = OOM.replace(b"4711", b"47110")
    assert kernelfacts.about([b"", b"x;y", other, OOM], 4711, since=4.0) == [
        "Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB, anon-rss:8kB"
    ]


@pytest.mark.parametrize(
    ("own", "events", "limit"),
    [
        ("0::/job\n", "job/memory.events", "job/memory.max"),
        # In a container its own control group appears as the root.
        ("0::/../elsewhere\n", "memory.events", "memory.max"),
        (
            "5:cpu:/\n4:memory:/job\n0::/\n",
            "memory/job/memory.oom_control",
            "memory/job/memory.limit_in_bytes",
        ),
    ],
)
def test_cgroups_of_both_versions_are_read(
    tmp_path: Path, own: str, events: str, limit: str
) -> None:
    top = tmp_path / "sys/fs/cgroup"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    for name, text in ((events, "under_oom 0\noom 9\noom_kill 2\n"), (limit, f"{1 << 30}\n")):
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    group = kernelfacts.cgroup(str(tmp_path))
    assert group is not None
    assert (group.oom_kills, group.limit) == (2, 1 << 30)
    assert os.path.samefile(group.file, top / events)


def now(monkeypatch: pytest.MonkeyPatch, *, oom_kills: int) -> None:
    group = kernelfacts.Cgroup("memory.events", oom_kills, 1 << 30)
    monkeypatch.setattr(kernelfacts, "cgroup", lambda: group)
    monkeypatch.setattr(kernelfacts, "records", list)


def test_s14_a_count_that_rose_is_a_fact_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    now(monkeypatch, oom_kills=3)
    first, memory = kernelfacts.of(killed(9), Baseline(0.0, 2))
    assert first == (
        "The kernel's out-of-memory killer did it: its count for our cgroup rose from 2 to 3 "
        "(memory.events)."
    )
    assert memory.startswith("Its peak memory use was 3 GiB; this host has ")
    assert memory.endswith(", our cgroup may use 1 GiB.")


def test_s14_no_count_means_another_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    now(monkeypatch, oom_kills=2)
    assert "look for another sender" in kernelfacts.of(killed(9), Baseline(0.0, 2))[0]


def test_s14_the_kernels_log_is_the_best_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    now(monkeypatch, oom_kills=2)
    monkeypatch.setattr(kernelfacts, "records", lambda: [OOM])
    facts = kernelfacts.of(killed(9), Baseline(0.0, 2))
    assert facts[0] == "The kernel's out-of-memory killer did it."
    assert "anon-rss:8kB" in facts[1]
