"""Records of collectives are sent to the coordinator's host, which names differing ranks once."""

from __future__ import annotations

import base64
import re
import zlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import plans
import pytest
from timers import Timers

from fleetrun.inject.flight_recorder import OPERATIONS, FlightRecorder
from fleetrun.postmortem import investigation, kernelfacts
from fleetrun.run.events import Failure, Gathered, Outcome
from fleetrun.session.messages import PackedCollectives
from fleetrun.watch.flightrecords import FlightRecords

if TYPE_CHECKING:
    from pathlib import Path

    from fleetrun.run.events import RunWarning

TEXT = "ank 0 called all_reduce where rank 1 called broadcast: collective 1 of all ranks"
SITE = re.compile(r" in \S+:\d+")


def record(path: Path, operation: str, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Let RANK call OPERATION among two ranks, with a recorder that writes PATH."""
    monkeypatch.setenv("PADDLE_TRAINER_ID", str(rank))
    group = SimpleNamespace(name=lambda: "GLOO")
    recorder = FlightRecorder(str(path))
    recorder.add(group, (0, 1))
    recorder.begin(group, OPERATIONS[operation], ())


def two_hosts(
    tmp_path: Path,
    operations: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    coordinator: int = 0,
    **job: Any,
) -> tuple[list[FlightRecords], dict[type, Any]]:
    """Return the records of two hosts, whose ranks have called OPERATIONS, and the sent messages.

    The COORDINATOR is first.
    """
    hearers: dict[type, Any] = {}
    hosts = []
    for node, operation in enumerate(operations):
        ring = tmp_path / f"node{node}" / f"collectives.{node}"
        ring.parent.mkdir()
        record(ring, operation, monkeypatch, node)
        plan = plans.plan(
            hosts=("a", "b"),
            node=node,
            per_node=1,
            cwd=str(tmp_path),
            run_dir=f"node{node}",
            env={"FLEETRUN_FLIGHT_RECORDER": str(ring)},
        )
        session: Any = SimpleNamespace(
            hearers=hearers if node == coordinator else {},
            serves=node == coordinator,
            to_coordinator=lambda message: hearers[PackedCollectives](1 - coordinator, message),
        )
        hosts.append(FlightRecords(plans.job(plan, **job), session))
    return hosts if coordinator == 0 else hosts[::-1], hearers


@pytest.mark.parametrize("coordinator", [0, 1])
def test_ranks_of_two_hosts_that_differ_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coordinator: int
) -> None:
    remarks: list[str] = []
    declared: list[RunWarning] = []
    timers = [Timers(), Timers()]
    hosts, hearers = two_hosts(
        tmp_path,
        ("all_reduce", "broadcast"),
        monkeypatch,
        coordinator,
        log=lambda text: remarks.append(SITE.sub("", text)),
    )
    for host, own_timers in zip(hosts, timers, strict=True):
        host.declare = declared.append  # type: ignore[assignment]
        host.open(own_timers)
    # A host's report on another host's rank, or on another generation, is ignored.
    other = 1 - coordinator
    ring = (tmp_path / f"node{other}/collectives.{other}").read_bytes()
    packed = base64.b64encode(zlib.compress(ring)).decode()
    for message in (PackedCollectives(0, coordinator, packed), PackedCollectives(1, other, packed)):
        hearers[PackedCollectives](other, message)
    assert remarks == []
    # A host reports its own rank once that has waited for long.
    assert timers[1].elapse("collectives")
    assert remarks == []
    hosts[1].send()
    assert remarks == [f"R{TEXT}."]
    assert timers[0].elapse("collectives")
    assert remarks == [f"R{TEXT}."]
    assert [(hang.what, hang.labels) for hang in declared] == [("desync", ("rank 0", "rank 1"))]
    assert (tmp_path / f"node{coordinator}/collectives.{other}").exists()
    (finding,) = hosts[0].verdict({})
    assert SITE.sub("", finding.text) == f"r{TEXT}"
    hosts[0].on_event(Gathered(1, plans.plan(), 0.0))
    assert hosts[0].verdict({}) == ()


def test_what_failed_on_another_host_is_explained_by_the_records_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = "all_reduce", "broadcast"
    hosts, _ = two_hosts(tmp_path, operations, monkeypatch, log=lambda _: None)
    hosts[0].declare = lambda _: None
    hosts[0].open(Timers())
    ring = str(tmp_path / "node0/collectives.0")
    env = {"FLEETRUN_FLIGHT_RECORDER": ring}
    plan = plans.plan(hosts=("a", "b"), per_node=1, cwd=str(tmp_path), run_dir="node0", env=env)

    def evidence(exit_code: int) -> list[str]:
        outcome = Outcome(Failure("b", "rank 1 was killed by SIGABRT", exit_code))
        findings = investigation.investigate(plan, outcome, kernelfacts.Baseline(0.0))
        return [SITE.sub("", text) for text in findings.evidence]

    assert evidence(134) == []
    hosts[1].send()
    assert evidence(134) == [f"R{TEXT}."]
    # A hang already has its verdict.
    assert evidence(124) == []
