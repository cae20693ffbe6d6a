"""A running job reports once which rank is slow and why, from the hosts' measurements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import plans
import pytest
from metricsrecords import a_record
from timers import Timers

from fleetrun.records import metricsfile, names
from fleetrun.session.exchange import HostConditions, LinkConditions, RankConditions
from fleetrun.sources.slowness import SlowRanks

if TYPE_CHECKING:
    from pathlib import Path

    from fleetrun.run.events import RunWarning


class Host:
    """A host with measurements written by a test."""

    def __init__(self, folder: Path, session: Any = None, node: int = 0, **plan: Any) -> None:
        self.path = folder / f"node{node}"
        self.path.mkdir()
        self.remarks: list[str] = []
        self.declared: list[RunWarning] = []
        self.timers = Timers()
        made = plans.plan(cwd=str(folder), run_dir=f"node{node}", node=node, **plan)
        self.job = plans.job(made, log=self.remarks.append, metrics_period_s=5.0)
        self.slow = SlowRanks(self.job, session)
        self.slow.open(self.timers, self.declared.append)

    def measure(
        self,
        looks: int,
        *,
        first: int = 0,
        step: int | None = 3,
        queued: float = 0.6,
        attempt: int = 0,
        busy: range = range(1000),
    ) -> None:
        """Write and read LOOKS measurements, in BUSY of which the last rank waits for a processor.

        It waits for QUEUED of the time.
        """
        ranks = [spec.rank.rank for spec in self.job.plan.processes if spec.rank is not None]
        for look in range(first, first + looks):
            waited = len(busy[: max(0, look - busy.start)])
            uses = tuple(
                a_record()
                .ranks[0]
                ._replace(
                    process=f"trainer.{rank}",
                    rank=rank,
                    pid=100 * attempt + rank,
                    step=step,
                    queued_s=5.0 * (queued * waited if rank == ranks[-1] else 0.01 * look),
                    processors=str(rank),
                )
                for rank in ranks
            )
            record = a_record()._replace(monotonic=5.0 * look, attempt=attempt, ranks=uses, gpus=())
            metricsfile.append(str(self.path / names.METRICS), record)
            assert self.timers.elapse("slow")


TEXT = "Rank 1 waits 60% of the time for processor 1, which other processes use, too."


def test_the_slow_rank_is_named_once_when_ranks_train(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.measure(7, step=None)
    assert host.remarks == []
    host.measure(6)
    assert host.remarks == []
    host.measure(14)
    assert host.remarks == [TEXT]
    assert [(warning.what, warning.labels) for warning in host.declared] == [
        ("straggler", ("rank 1",))
    ]
    assert (host.slow.why([1]), host.slow.why([0])) == (TEXT[0].lower() + TEXT[1:-1], "")
    host.measure(13)
    assert host.remarks == [TEXT]
    host.slow.restart()
    assert host.slow.why([1]) == ""
    # Measurements of the last attempt are about other processes.
    host.measure(3)
    host.measure(6, attempt=5)
    assert host.slow.why([1]) == ""
    host.measure(20, attempt=5)
    assert host.slow.why([1])


@pytest.mark.parametrize(("busy", "remarks"), [(range(6, 9), []), (range(6, 18), [TEXT])])
def test_a_rank_that_waits_for_its_processors_for_a_while_is_not_slow(
    tmp_path: Path, busy: range, remarks: list[str]
) -> None:
    """As measured: ranks 1 and 2 shared a processor, but for some seconds rank 0 waited more."""
    host = Host(tmp_path)
    host.measure(25, busy=busy)
    assert host.remarks == remarks


def test_ranks_that_report_no_step_are_compared_after_a_minute(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.measure(26, step=None)
    assert host.remarks == [TEXT]


def test_the_coordinators_host_compares_all_hosts(tmp_path: Path) -> None:
    hearers: dict[type, Any] = {}
    names_of = ("a", "b", "c")
    hosts = [
        Host(
            tmp_path,
            SimpleNamespace(
                hearers=hearers if not node else {},
                to_coordinator=lambda message, node=node: hearers[HostConditions](node, message),
            ),
            node,
            hosts=names_of,
            per_node=1,
        )
        for node in range(3)
    ]
    rank = RankConditions(1, 0.9, 0.1, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, "0")
    # A host's report on another host's ranks, on no host, or on another attempt is ignored.
    for wrong in (
        HostConditions(0, (rank,), (), ()),
        HostConditions(0, (), (), (LinkConditions(7, 0.1, -1.0, -1.0),)),
        HostConditions(1, (rank._replace(process=2),), (), ()),
    ):
        hearers[HostConditions](2, wrong)
    for first, looks in ((0, 7), (7, 3), (10, 3)):
        for host, queued in zip(hosts, (0.0, 0.0, 0.5), strict=True):
            assert hosts[0].remarks == []
            host.measure(looks, first=first, queued=queued)
    text = "Rank 2 waits 50% of the time for processor 2, which other processes use, too."
    assert [host.remarks for host in hosts] == [[text], [], []]
