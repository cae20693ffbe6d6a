"""One host collects the logs of others, whole or their ends, and nothing else."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import plans
import pytest
from timers import Timers

from fleetrun.rundir.folder import Folder
from fleetrun.session.exchange import Dismissed, LogPart, SendLog
from fleetrun.watch.log_collection import LogCollector, LogServer

if TYPE_CHECKING:
    from pathlib import Path

    from fleetrun.model import LaunchPlan


def plan(folder: Path, node: int, **changes: Any) -> LaunchPlan:
    hosts = ("a", "b", "c")
    return plans.plan(hosts=hosts, node=node, cwd=str(folder), run_dir=f"node{node}", **changes)


class Job:
    """Three hosts of two ranks, of which the first gathers."""

    def __init__(
        self,
        folder: Path,
        *,
        everything: bool = False,
        generation: int = 0,
        splits_logs: bool = False,
    ) -> None:
        self.folder = folder
        for node in range(3):
            (folder / f"node{node}").mkdir()
        self.timers, self.remarks = Timers(), list[str]()
        self.dismissed: list[int] = []
        self.gone: set[int] = set()
        self.asked: list[tuple[int, SendLog]] = []
        self.collector = LogCollector(
            plan(folder, 0, generation=generation, splits_logs=splits_logs),
            Folder(str(folder / "node0")),
            waiting=self.timers,
            ask=self.ask,
            is_there=lambda node: node not in self.gone,
            done=self.remarks.append,
            everything=everything,
        )
        self.servers = {
            node: LogServer(
                plan(folder, node, splits_logs=splits_logs),
                lambda part, node=node: self.collector.take(node, part),  # type: ignore[misc]
            )
            for node in (1, 2)
        }
        for node, server in self.servers.items():
            for later in range(1, generation + 1):
                server.take(plan(folder, node, generation=later), later)

    def ask(self, node: int, message: SendLog | Dismissed) -> None:
        """Note the collector's request."""
        if isinstance(message, Dismissed):
            self.dismissed.append(node)
        else:
            self.asked.append((node, message))

    def write(self, rank: int, data: bytes, name: str = "") -> None:
        """Append DATA to the output of RANK."""
        path = self.folder / f"node{rank // 2}" / (name or f"workerlog.{rank % 2}")
        path.write_bytes(data)

    def run(self) -> None:
        """Let the hosts answer all requests."""
        self.collector.begin([1, 2])
        while self.collector.is_busy:
            if self.asked:
                node, message = self.asked.pop(0)
                self.servers[node].asked(message)
                self.servers[node].complete()
            else:
                # The rate is limited: the next request waits.
                self.timers.elapse_all()

    def gathered(self, rank: int) -> bytes:
        """Return the collected part of RANK's log."""
        return (self.folder / "node0" / "gathered" / f"workerlog.{rank}").read_bytes()


def test_the_ends_of_all_logs_come_under_the_ranks_of_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write(2, b"two\n")
    job.write(3, b"\xff\x00" * 100_000)
    job.write(4, b"")
    job.run()
    assert job.gathered(2) == b"two\n"
    left = b"[fleetrun: of 200000 bytes the last 65536]\n"
    assert job.gathered(3) == left + b"\xff\x00" * 32768
    assert job.gathered(4) == b""
    assert sorted(job.dismissed) == [1, 2]
    assert "ranks 2-5" in job.remarks[0]


def test_standard_error_comes_where_it_has_a_log_of_its_own(tmp_path: Path) -> None:
    job = Job(tmp_path, splits_logs=True)
    for rank in range(2, 6):
        job.write(rank, b"out")
    job.write(3, b"err\n", "workererr.1")
    job.run()
    gathered = tmp_path / "node0/gathered"
    assert (gathered / "workererr.3").read_bytes() == b"err\n"
    assert sorted(path.name for path in gathered.glob("workererr.*")) == ["workererr.3"]
    assert job.gathered(3) == b"out"


def test_whole_logs_come_with_those_of_earlier_attempts(tmp_path: Path) -> None:
    job = Job(tmp_path, everything=True, generation=1)
    job.write(5, b"x" * 100_000, "workerlog.1.attempt1")
    job.write(5, b"first")
    job.run()
    assert job.gathered(5) == b"first"
    assert (tmp_path / "node0/gathered/workerlog.5.attempt1").stat().st_size == 100_000


def test_who_does_not_answer_is_left_out_and_named(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write(4, b"four")
    job.collector.begin([1, 2])
    job.servers[2].complete()
    job.gone.add(1)
    while job.collector.is_busy:
        requests = [message for node, message in job.asked if node == 2]
        job.asked.clear()
        for message in requests:
            job.servers[2].asked(message)
        if not requests:
            job.timers.elapse_all()
    assert job.gathered(4) == b"four"
    assert "Those of ranks 2-3 could not be gathered" in job.remarks[0]
    assert sorted(job.dismissed) == [1, 2]


@pytest.mark.parametrize(
    "part",
    [
        LogPart(2, 0, 0, 9, "no base64!"),
        LogPart(2, 0, 0, 1 << 40, base64.b64encode(b"x" * 40_000).decode()),
    ],
)
def test_a_host_that_says_nonsense_is_asked_no_more(part: LogPart, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.collector.begin([1])
    job.collector.take(1, part)
    assert job.dismissed == [1]
    assert not job.collector.is_busy


def test_what_was_not_asked_for_changes_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.collector.begin([1])
    for part in (
        LogPart(0, 0, 0, 4, "aaaa"),
        LogPart(2, 7, 0, 4, "aaaa"),
        LogPart(-1, 0, 0, 1, ""),
    ):
        job.collector.take(1, part)
        job.collector.take(2, part)
    assert list((tmp_path / "node0" / "gathered").iterdir()) == []
    job.collector.close()


def test_a_host_answers_for_its_own_logs_alone(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.write(2, b"mine")
    (tmp_path / "secret").write_text("not yours")
    (tmp_path / "node1" / "workerlog.1").symlink_to(tmp_path / "secret")
    parts: list[LogPart] = []
    server = LogServer(plan(tmp_path, 1), parts.append)
    server.complete()
    for process in (-1, 0, 2, 3, 4, 99):
        server.asked(SendLog(process, 0, -1))
    assert [base64.b64decode(part.data) for part in parts] == [b"", b"", b"mine", b"", b"", b""]


def test_a_host_that_came_later_knows_which_of_its_attempts_is_meant(tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    parts: list[LogPart] = []
    server = LogServer(plan(tmp_path, 1, generation=3), parts.append)
    server.take(plan(tmp_path, 1, generation=5), 1)
    (tmp_path / "node1" / "workerlog.0").write_bytes(b"of 3")
    (tmp_path / "node1" / "workerlog.0.attempt1").write_bytes(b"of 5")
    server.complete()
    for generation in (3, 4, 5):
        server.asked(SendLog(2, generation, 0))
    assert [base64.b64decode(part.data) for part in parts] == [b"of 3", b"", b"of 5"]
