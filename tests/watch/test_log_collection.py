"""Hosts send their logs, whole or their ends, and only to files of their own ranks."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, cast

import plans
import pytest
from timers import Timers

from fleetrun.rundir.folder import Folder
from fleetrun.session.exchange import Dismissed, LogPart
from fleetrun.watch.log_collection import LogReceiver, LogSender

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fleetrun.model import LaunchPlan
    from fleetrun.session.driver import Session


class Link:
    """A session of three hosts that delivers at once; the coordinator's is host 0."""

    def __init__(self, node: int, hosts: dict[int, Link]) -> None:
        self.node, self.hosts = node, hosts
        self.hearers: dict[type, Callable[[int, Any], None]] = {}
        self.dismissed: set[int] = set()
        hosts[node] = self

    def connected(self) -> tuple[int, ...]:
        """Return the other hosts."""
        return tuple(node for node in self.hosts if node)

    def to_coordinator(self, message: object) -> None:
        """Deliver MESSAGE to host 0."""
        self.hosts[0].hearers[type(message)](self.node, message)

    def to_member(self, node: int, message: object) -> None:
        """Deliver MESSAGE to host NODE."""
        if isinstance(message, Dismissed):
            self.dismissed.add(node)
        else:
            self.hosts[node].hearers[type(message)](0, message)


class Job:
    """Three hosts of two ranks, of which the first gathers."""

    def __init__(self, folder: Path, *, everything: bool = False, **changes: Any) -> None:
        self.timers, self.remarks = Timers(), list[str]()
        self.folder, self.hosts = folder, dict[int, Link]()
        links = [Link(node, self.hosts) for node in range(3)]
        sessions = [cast("Session", link) for link in links]
        for node in range(3):
            (folder / f"node{node}").mkdir()
        own = Folder(str(folder / "node0"))
        self.receiver = LogReceiver(
            sessions[0], own, self.timers, log=self.remarks.append, everything=everything
        )
        self.receiver.take(self.plan(0, **changes), 0)
        self.senders = [LogSender(session, everything=everything) for session in sessions[1:]]
        for node, sender in enumerate(self.senders, 1):
            for generation in range(changes.get("generation", 0) + 1):
                sender.take(self.plan(node, **{**changes, "generation": generation}), generation)

    def plan(self, node: int, **changes: Any) -> LaunchPlan:
        """Return the plan of host NODE."""
        hosts = ("a", "b", "c")
        return plans.plan(
            hosts=hosts, node=node, cwd=str(self.folder), run_dir=f"node{node}", **changes
        )

    def write(self, rank: int, data: bytes, name: str = "") -> None:
        """Write DATA as a log of RANK."""
        path = self.folder / f"node{rank // 2}" / (name or f"workerlog.{rank % 2}")
        path.write_bytes(data)

    def run(self) -> None:
        """Gather all."""
        for sender in self.senders:
            sender.begin()
        self.receiver.begin()
        while self.receiver.is_busy:
            # The rate is limited: the next part waits.
            self.timers.elapse_all()

    def gathered(self, name: str) -> bytes:
        """Return what has come as NAME."""
        return (self.folder / "node0" / "gathered" / name).read_bytes()


def test_the_ends_of_all_logs_come_under_the_ranks_of_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, splits_logs=True)
    for rank in (2, 4, 5):
        job.write(rank, b"%d\n" % rank)
    job.write(3, b"\xff\x00" * 100_000)
    job.write(3, b"err\n", "workererr.1")
    job.run()
    assert job.gathered("workerlog.2") == b"2\n"
    left = b"[fleetrun: of 200000 bytes the last 65536]\n"
    assert job.gathered("workerlog.3") == left + b"\xff\x00" * 32768
    assert job.gathered("workererr.3") == b"err\n"
    assert "ranks 2-5" in job.remarks[0]
    assert job.hosts[0].dismissed == {1, 2}


def test_whole_logs_come_with_those_of_earlier_attempts(tmp_path: Path) -> None:
    job = Job(tmp_path, everything=True, generation=1)
    job.write(5, b"x" * 100_000, "workerlog.1.attempt1")
    job.write(5, b"first")
    job.run()
    assert job.gathered("workerlog.5") == b"first"
    assert job.gathered("workerlog.5.attempt1") == b"x" * 100_000
    assert "Those of ranks 2-4 could not be gathered" in job.remarks[0]


def test_a_host_that_is_lost_is_left_out_and_named(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write(4, b"four")
    job.receiver.begin()
    del job.hosts[1]
    job.senders[1].begin()
    while job.receiver.is_busy:
        job.timers.elapse_all()
    assert job.gathered("workerlog.4") == b"four"
    assert "Those of ranks 2-3, 5 could not be gathered" in job.remarks[0]


@pytest.mark.parametrize(
    "part",
    [
        LogPart(2, 0, 0, 9, "no base64!"),
        LogPart(2, 0, 0, 40_000, base64.b64encode(b"x" * 40_000).decode()),
        LogPart(2, 0, 4, 7, "aaaa"),
        LogPart(0, 0, 0, 4, "aaaa"),
        LogPart(4, 0, 0, 4, "aaaa"),
        LogPart(2, 7, 0, 4, "aaaa"),
        LogPart(-1, 0, 0, 4, "aaaa"),
    ],
)
def test_a_host_writes_to_logs_of_its_own_ranks_alone(part: LogPart, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.receiver.begin()
    job.hosts[1].to_coordinator(part)
    assert job.hosts[0].dismissed == {1}
    assert not (tmp_path / "node0" / "gathered").exists()


def test_links_and_older_files_are_not_followed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    (tmp_path / "secret").write_text("not yours")
    (tmp_path / "node1" / "workerlog.1").symlink_to(tmp_path / "secret")
    (tmp_path / "node0" / "gathered").mkdir()
    (tmp_path / "node0" / "gathered" / "workerlog.4").symlink_to(tmp_path / "secret")
    job.write(4, b"four")
    job.run()
    assert (tmp_path / "secret").read_text() == "not yours"
    assert not (tmp_path / "node0" / "gathered" / "workerlog.3").exists()
