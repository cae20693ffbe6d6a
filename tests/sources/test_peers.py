"""Launchers of several hosts, all in this process: what each hears, and what it makes of it."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import ports
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import LONG_S

from fleetrun.errors import EnvironmentFault
from fleetrun.model import Endpoint, ExitStatus, LaunchPlan, Peers, ProcessSpec, RankSpec, Rules
from fleetrun.run.events import (
    Exited,
    Finished,
    Gathered,
    Interrupted,
    Outcome,
    PeerFailed,
    PeersDone,
)
from fleetrun.run.loop import Loop
from fleetrun.sources import peers
from fleetrun.sources.peers import Assembly, Word

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fleetrun.run.events import Declared

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
OK = ExitStatus(code=0)


class Job:
    """A server on the first of three hosts, a trainer on each; what every launcher declares."""

    def __init__(self, *, restarts: int = 0, key: str = "job") -> None:
        self.loop = Loop()
        self.place = Peers(0, HOSTS[0], ports.free(1), key)
        self.restarts = restarts
        self.said: list[str] = []
        self.declared: dict[int, list[Declared]] = {}
        self.launchers: dict[int, Assembly] = {}

    def plan(self, node: int) -> LaunchPlan:
        """Plan what runs on NODE."""
        ranks = tuple(
            RankSpec("TRAINER", each, 0, each, (), Endpoint(host, 1 + each))
            for each, host in enumerate(HOSTS)
        )
        trainer = ProcessSpec(f"trainer.{node}", (), {}, (), "workerlog.0", rank=ranks[node])
        return LaunchPlan(
            job_id="job",
            mode="ps",
            engine="static",
            generation=0,
            node_rank=node,
            nodes=HOSTS,
            ranks=ranks,
            processes=(trainer,),
            rules=Rules(max_restarts=self.restarts),
            cwd="/",
            log_dir="/",
            run_dir="/",
        )

    def start(self, *nodes: int, place: Peers | None = None) -> None:
        """Start the launchers of NODES."""
        for node in nodes:
            heard = self.declared[node] = []
            one = self.launchers[node] = Assembly(
                self.plan(node), place or self.place, say=self.said.append
            )
            one.prepare()
            one.open(_Own(self.loop, node), heard.append)

    def done(self, *nodes: int, attempt: int = 0) -> None:
        """Let the trainers of NODES end well."""
        for node in nodes:
            exited = Exited(0, f"rank {node}", OK, 1.0, 100 + node, attempt)
            self.launchers[node].tell(exited)

    def until(self, condition: Callable[[], bool]) -> None:
        """Let things happen until CONDITION holds."""
        deadline = time.monotonic() + LONG_S
        self.loop.alarm("test", deadline, lambda: None)
        while not condition():
            assert time.monotonic() < deadline, "it never came to that"
            self.loop.turn()

    def heard(self, *nodes: int) -> None:
        """Wait until each of NODES has declared something."""
        self.until(lambda: all(self.declared[node] for node in nodes))

    def close(self) -> None:
        """End all launchers."""
        for one in self.launchers.values():
            one.close()
        self.loop.close()


class _Own:
    """A launcher's own part of the one loop."""

    def __init__(self, loop: Loop, node: int) -> None:
        self.watch, self.unwatch = loop.watch, loop.unwatch
        self._loop, self._node = loop, node

    def alarm(self, key: object, at: float | None, callback: Callable[[], None]) -> None:
        self._loop.alarm((self._node, str(key)), at, callback)


@pytest.fixture
def job() -> Iterator[Job]:
    """Make a job that may start again once."""
    made = Job(restarts=1)
    yield made
    made.close()


def failure(node: int, code: int = 7, attempt: int = 0) -> Exited:
    return Exited(0, f"rank {node}", ExitStatus(code=code), 1.0, 100 + node, attempt)


def test_it_is_done_when_all_are(job: Job) -> None:
    job.start(0, 1, 2)
    job.done(0, 2)
    job.until(lambda: bool(job.launchers[2].connected))
    assert job.declared == {0: [], 1: [], 2: []}
    job.done(1)
    job.heard(0, 1, 2)
    assert all(isinstance(each[0], PeersDone) for each in job.declared.values())


def test_the_hub_may_come_last(job: Job) -> None:
    job.start(1, 2)
    job.done(1, 2)
    job.start(0)
    job.done(0)
    job.heard(0, 1, 2)


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_failure_is_heard_by_all_others(job: Job, culprit: int) -> None:
    job.start(0, 1, 2)
    job.launchers[culprit].tell(failure(culprit))
    others = {0, 1, 2} - {culprit}
    job.heard(*others)
    for node in others:
        (heard,) = job.declared[node]
        assert isinstance(heard, PeerFailed)
        assert heard.describe() == f"rank {culprit} exited with 7 on {HOSTS[culprit]}"
        assert (heard.exit_code, heard.attempt, heard.is_final) == (7, 0, False)
    assert job.declared[culprit] == []


def test_what_follows_a_failure_is_no_news(job: Job) -> None:
    job.start(0, 1)
    job.launchers[1].tell(failure(1))
    job.launchers[1].tell(failure(1, code=143))
    job.launchers[1].tell(Interrupted(2, 1.0))
    job.heard(0)
    job.until(lambda: bool(job.launchers[1].connected))
    assert len(job.declared[0]) == 1


def test_the_next_attempt_is_done_when_all_are_done_again(job: Job) -> None:
    job.start(0, 1, 2)
    job.done(0, 1)
    job.launchers[2].tell(failure(2))
    job.heard(0, 1)
    for node in range(3):
        job.launchers[node].tell(Gathered(1, job.plan(node), 1.0))
        job.declared[node].clear()
    job.done(0, 1, attempt=1)
    job.done(2, attempt=1)
    job.heard(0, 1, 2)
    assert all(
        isinstance(each[0], PeersDone) and each[0].attempt == 1 for each in job.declared.values()
    )


def test_late_news_of_an_earlier_attempt_settle_nothing(job: Job) -> None:
    job.start(0, 1, 2)
    for node in range(3):
        job.launchers[node].tell(Gathered(1, job.plan(node), 1.0))
    job.launchers[0].tell(PeerFailed(HOSTS[1], "rank 1 exited with 7", 7, 1.0, attempt=0))
    job.done(0, 1, 2, attempt=1)
    job.heard(0, 1, 2)
    assert all(isinstance(each[0], PeersDone) for each in job.declared.values())


def test_a_failure_of_the_last_attempt_is_final(job: Job) -> None:
    job.start(0, 1)
    for node in range(2):
        job.launchers[node].tell(Gathered(1, job.plan(node), 1.0))
    job.launchers[1].tell(failure(1, attempt=1))
    job.heard(0)
    (heard,) = job.declared[0]
    assert isinstance(heard, PeerFailed)
    assert heard.is_final


def test_who_comes_later_hears_how_it_has_ended(job: Job) -> None:
    job.start(0)
    ended = failure(0)
    job.launchers[0].tell(ended)
    job.launchers[0].tell(Finished(Outcome(ended), 1.0))
    assert job.launchers[0].is_busy()
    job.start(1)
    job.heard(1)
    (heard,) = job.declared[1]
    assert isinstance(heard, PeerFailed)
    assert heard.is_final


def test_a_launcher_that_is_lost_fails_the_job(job: Job) -> None:
    job.start(0, 1, 2)
    job.until(lambda: len(job.launchers[0].connected) == 2)
    job.launchers[1].close()
    job.heard(0, 2)
    for node in (0, 2):
        (heard,) = job.declared[node]
        assert isinstance(heard, PeerFailed)
        assert heard.describe() == f"fleetrun was lost on {HOSTS[1]}"


def test_who_leaves_with_a_word_is_not_lost(job: Job) -> None:
    job.start(0, 1)
    job.done(0, 1)
    job.until(lambda: len(job.launchers[0].connected) == 1)
    job.launchers[1].tell(Finished(Outcome(None), 1.0))
    job.until(lambda: not job.launchers[0].connected)
    assert job.declared[0] == []


def test_nobody_waits_for_ever_for_a_hub_that_does_not_answer(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_UNHEARD_S", 0.05)
    job.start(1)
    job.done(1)
    job.heard(1)
    assert isinstance(job.declared[1][0], PeersDone)
    assert "The launcher of 127.0.0.1 does not answer at port" in job.said[0]


def test_nobody_waits_for_ever_for_a_host_that_never_calls(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_PATIENCE_S", 0.3)
    job.start(0, 1)
    job.done(0, 1)
    job.heard(0, 1)
    assert "The launcher of 127.0.0.3 has not called" in job.said[0]


def test_another_job_at_the_port_is_none_of_ours(job: Job) -> None:
    job.start(0)
    job.start(1, place=job.place._replace(key="another"))
    with socket.create_connection((HOSTS[0], job.place.ports[0])) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        heard: list[bytes] = []
        stranger.settimeout(0)

        def has_hung_up() -> bool:
            try:
                heard.append(stranger.recv(100))
            except BlockingIOError:
                return False
            return True

        job.until(has_hung_up)
    assert heard == [b""]
    job.done(0, 1)
    assert job.declared == {0: [], 1: []}


def test_a_port_that_is_taken_is_passed_over(job: Job) -> None:
    with socket.create_server((HOSTS[0], 0)) as other:
        taken = other.getsockname()[1]
        job.place = job.place._replace(ports=(taken, *job.place.ports))
        job.start(0, 1, 2)
        job.done(0, 1, 2)
        job.heard(0, 1, 2)


def test_without_a_free_port_nothing_starts(job: Job) -> None:
    with socket.create_server((HOSTS[0], 0)) as other:
        taken = other.getsockname()[1]
        hub = Assembly(
            job.plan(0),
            job.place._replace(ports=(taken,)),
            say=job.said.append,
        )
        with pytest.raises(EnvironmentFault, match="are all taken"):
            hub.prepare()


@given(st.binary() | st.from_regex(rb"\[.*\]"))
def test_what_is_no_word_is_refused(line: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(peers.read(line), Word)
