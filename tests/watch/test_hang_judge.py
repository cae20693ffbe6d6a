"""A job hangs when all of its hosts are silent, and the one that stands still is named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import plans

from fleetrun.watch.flightrecords import FlightRecords
from fleetrun.watch.hang_judge import HangJudge

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fleetrun.model import LaunchPlan
    from fleetrun.run.events import Hung

WAITING = (("all_reduce", "/job/train.py", 4), ("<module>", "/job/train.py", 9))
LOADING = (("load\x1b[1m", "/job/train.py", 6), ("<module>", "/job/train.py", 8))


class Wire:
    """The session of one of two hosts, of which host 0 has the coordinator."""

    def __init__(self, job: Job, node_rank: int) -> None:
        self._job = job
        self._node_rank = node_rank
        self.hearers: dict[type, Callable[[int, Any], None]] = {}

    def connected(self) -> tuple[int, ...]:
        """Return the other hosts."""
        return self._job.others

    def to_coordinator(self, message: object) -> None:
        """Deliver MESSAGE at once."""
        self._job.wires[0].hearers[type(message)](self._node_rank, message)


class Job:
    """Two hosts of two ranks."""

    def __init__(self, folder: Path) -> None:
        self.others: tuple[int, ...] = (1,)
        self.wires = [Wire(self, 0), Wire(self, 1)]
        self.declared: list[Hung] = []
        self.stacks = {0: WAITING, 1: WAITING, 2: WAITING, 3: LOADING}
        self.hosts = [
            HangJudge(
                job := plans.job(plan(folder, node)),
                wire,  # type: ignore[arg-type]
                FlightRecords(job, None),
                self.declared.append,
            )
            for node, wire in enumerate(self.wires)
        ]

    def report(self, node: int, seconds: float | None = 30.0) -> None:
        """Report for the ranks of NODE."""
        own = range(2 * node, 2 * node + 2)
        self.hosts[node].report(
            seconds,
            {rank % 2: self.stacks[rank] for rank in own if rank in self.stacks},
        )

    def hang(self) -> Hung:
        """Let both hosts be silent; return what is declared."""
        self.report(0)
        assert self.declared == []
        self.report(1)
        (hung,) = self.declared
        return hung


def plan(folder: Path, node: int) -> LaunchPlan:
    return plans.plan(hosts=("10.0.0.1", "10.0.0.2"), node=node, cwd=str(folder), run_dir=".")


def test_hosts_that_wait_for_one_that_stands_still_are_not_the_cause(tmp_path: Path) -> None:
    hung = Job(tmp_path).hang()
    assert hung.odd == ("rank 3",)
    # Text of another host is shown without control characters.
    assert hung.places[0] == (("rank 3",), r"load\x1b[1m (train.py:6)")
    assert hung.seconds >= 30.0


def test_a_host_that_works_lets_the_others_wait(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for _ in range(3):
        job.report(0)
        job.report(1, 0.0)
    job.report(0, 0.0)
    job.report(1)
    job.report(1, 0.0)
    job.report(0)
    assert job.declared == []


def test_a_host_without_ranks_has_no_say(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.report(1, None)
    job.report(0)
    assert len(job.declared) == 1


def test_nobody_judges_while_a_host_is_cut_off(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.others = ()
    job.report(0)
    assert job.declared == []
