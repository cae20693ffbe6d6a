"""A job hangs when all of its hosts are silent, and the one that stands still is named."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import plans
from timers import Timers

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

    def to_member(self, node_rank: int, message: object) -> None:
        """Deliver MESSAGE at once."""
        self._job.wires[node_rank].hearers[type(message)](0, message)


class Job:
    """Two hosts of two ranks."""

    def __init__(self, folder: Path) -> None:
        self.others: tuple[int, ...] = (1,)
        self.timers = Timers()
        self.wires = [Wire(self, 0), Wire(self, 1)]
        self.declared: list[Hung] = []
        self.asked: list[int] = []
        self.stacks = {0: WAITING, 1: WAITING, 2: WAITING, 3: LOADING}
        self.went_on: int | None = None
        # How long ago a rank has exited with 0.
        self.ended: dict[int, float] = {}
        self.hosts: list[HangJudge] = []
        for node, wire in enumerate(self.wires):
            host = HangJudge(plans.job(plan(folder, node)), wire, 5.0)  # type: ignore[arg-type]
            host.open(
                self.timers, collect=partial(self.collect, node), declare=self.declared.append
            )
            self.hosts.append(host)

    def collect(self, node: int, _seconds: float) -> None:
        """Answer for the ranks of NODE."""
        self.asked.append(node)
        running = [process for process in range(2) if 2 * node + process in self.stacks]
        mine = {process: self.stacks[2 * node + process] for process in running}
        went_on = self.went_on if node else None
        self.hosts[node].collected(
            mine,
            went_on=went_on,
            sign="life",
            unreached=[(0, "10.0.0.1:6070")] if node else (),
            ended={
                rank % 2: time.monotonic() - seconds
                for rank, seconds in self.ended.items()
                if rank // 2 == node
            },
        )


def plan(folder: Path, node: int) -> LaunchPlan:
    return plans.plan(hosts=("10.0.0.1", "10.0.0.2"), node=node, cwd=str(folder), run_dir=".")


def test_hosts_that_wait_for_one_that_stands_still_are_not_the_cause(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.hosts[0].report(30.0)
    assert job.asked == []
    job.hosts[1].report(30.0)
    assert sorted(job.asked) == [0, 1]
    (hung,) = job.declared
    assert hung.odd == ("rank 3",)
    # Text of another host is shown without control characters.
    assert hung.places[0] == (("rank 3",), r"load\x1b[1m (train.py:6)")
    assert hung.seconds >= 30.0
    stacks = (tmp_path / "stacks.3.txt").read_text()
    assert stacks.startswith("# rank 3 on 10.0.0.2")
    assert r"line 6 in load\x1b[1m" in stacks
    assert hung.unreached == ("rank 2 does not reach 10.0.0.1:6070",)
    # Its own host has written those.
    assert not (tmp_path / "stacks.0.txt").exists()


def test_ranks_that_have_ended_come_first(tmp_path: Path) -> None:
    job = Job(tmp_path)
    elsewhere = (("init_parallel_env", "/x/site-packages/paddle/parallel.py", 7), *WAITING[1:])
    job.stacks = {0: elsewhere, 1: WAITING, 2: WAITING}
    job.ended = {3: 60.0}
    job.hosts[0].report(30.0)
    job.hosts[1].report(30.0)
    (hung,) = job.declared
    ((ranks, text),) = hung.collectives
    assert ranks == ("rank 3",) == hung.odd
    assert re.fullmatch(
        r"rank 3 has ended: it exited with 0 at \d\d:\d\d:\d\d; the others may wait for it", text
    )


def test_one_that_stands_elsewhere_is_told_beside_those_that_have_ended(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.stacks = {1: WAITING, 3: LOADING, 2: WAITING}
    job.ended = {0: 60.0}
    job.hosts[0].report(30.0)
    job.hosts[1].report(30.0)
    (hung,) = job.declared
    assert hung.describe().startswith("the job hung for 30 s: rank 0 has ended: it exited with 0")
    assert hung.odd == ("rank 3",)


def test_a_host_that_works_lets_the_others_wait(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for _ in range(3):
        job.hosts[0].report(30.0)
        job.hosts[1].report(0.0)
    job.hosts[1].report(30.0)
    job.hosts[1].report(0.0)
    job.declared.clear()
    job.hosts[0].report(30.0)
    assert job.declared == []


def test_a_host_without_ranks_has_no_say(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.hosts[1].report(None)
    job.hosts[0].report(30.0)
    assert len(job.declared) == 1


def test_nobody_judges_while_a_host_is_cut_off(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.others = ()
    job.hosts[0].report(30.0)
    assert job.asked == []


def test_a_rank_that_goes_on_meanwhile_ends_the_suspicion(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.went_on = 1
    job.hosts[0].report(30.0)
    job.hosts[1].report(30.0)
    assert job.asked
    assert job.declared == []
    assert job.timers.set == {}


def test_a_host_that_does_not_answer_is_judged_without(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.wires[1].hearers = {kind: lambda *_: None for kind in job.wires[1].hearers}
    job.hosts[0].report(30.0)
    job.hosts[1].report(30.0)
    assert job.declared == []
    assert job.timers.elapse("stacks")
    assert len(job.declared) == 1


def test_a_host_without_a_session_judges_its_own_ranks_alone(tmp_path: Path) -> None:
    declared: list[Hung] = []
    judge = HangJudge(plans.job(plan(tmp_path, 1)), None, 5.0)

    def collect(_seconds: float) -> None:
        judge.collected({0: WAITING, 1: LOADING}, went_on=None, sign="life", unreached=())

    judge.open(Timers(), collect=collect, declare=declared.append)
    judge.report(30.0)
    (hung,) = declared
    assert [who for who, _ in hung.places] == [("rank 2",), ("rank 3",)]
