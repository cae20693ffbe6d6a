"""Processes that wait for others before they start: how readiness is asked for."""

from __future__ import annotations

import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest
from plans import generation
from waiting import LONG_S

from fleetrun.model import Endpoint
from fleetrun.run.loop import Loop
from fleetrun.run.readiness import Readiness

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType


@pytest.fixture
def server() -> socket.socket:
    """Make a port that refuses until a server listens on it."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener


def endpoint(server: socket.socket) -> Endpoint:
    return Endpoint("127.0.0.1", server.getsockname()[1])


def ask(
    groups: Sequence[tuple[Endpoint, ...]],
    gone: Sequence[Endpoint] = (),
    seconds: float = 0.3,
    attempts: int = 1,
    after: Callable[[], object] = lambda: None,
) -> list[str]:
    """Ask GROUPS for SECONDS at most, in each of ATTEMPTS, do AFTER; return what was heard last."""
    loop, heard = Loop(), list[str]()
    plan = generation([True], [0])
    process = plan.processes[0]._replace(awaits=tuple(groups))
    asking = Readiness(
        loop, heard.append, print, is_alive=bool, gone=gone, ready=lambda *_: heard.append("done")
    )
    for attempt in range(attempts):
        heard.clear()
        asking.begin(plan._replace(processes=(process,)), 0, attempt)
        deadline = time.monotonic() + seconds
        while not heard and time.monotonic() < deadline:
            loop.turn()
        after()
    asking.stop()
    loop.close()
    return heard or [str(group[0]) for group in asking._silent]


def test_one_of_each_group_is_enough(server: socket.socket) -> None:
    with server, socket.create_server(("127.0.0.1", 0)) as other:
        group = (endpoint(server), endpoint(other))
        assert ask([group], seconds=LONG_S) == ["done"]
        assert ask([group, group[:1]]) == [str(endpoint(server))]
        server.listen()
        assert ask([group, group[:1]], seconds=LONG_S) == ["done"]


def test_who_has_listened_before_is_asked_again_in_another_attempt(server: socket.socket) -> None:
    server.listen()
    awaited = endpoint(server)
    # Long enough for the first attempt, which is answered at once.
    assert ask([(awaited,)], seconds=2.0, attempts=2, after=server.close) == [str(awaited)]


def test_who_is_gone_is_not_waited_for(server: socket.socket) -> None:
    with server:
        assert ask([(endpoint(server),)], [endpoint(server)], LONG_S) == ["done"]


def test_a_name_that_nobody_knows_is_one_that_does_not_listen() -> None:
    nowhere = Endpoint("nowhere.invalid", 1)
    assert ask([(nowhere,)]) == [str(nowhere)]


def test_who_does_not_answer_at_all_blocks_nobody() -> None:
    # 192.0.2.0/24 is for documentation: no host is there.
    far = Endpoint("192.0.2.1", 1)

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise AssertionError("the connect has blocked")

    before = signal.signal(signal.SIGALRM, interrupt)
    # A blocking connect gives up after two minutes.
    signal.alarm(60)
    try:
        assert ask([(far,)]) == [str(far)]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
