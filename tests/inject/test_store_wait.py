"""A rank that starts before the store that it connects to."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import ports

from fleetrun.inject import store_wait

if TYPE_CHECKING:
    import pytest


def test_a_rank_waits_until_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = ports.free(1)
    connect = socket.create_connection
    calls = 0
    with ExitStack() as stack:

        def connect_third_time(*args: Any) -> socket.socket:
            nonlocal calls
            calls += 1
            if calls == 3:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return connect(*args)

        monkeypatch.setattr(socket, "create_connection", connect_third_time)
        store_wait.wait("127.0.0.1", port)
    assert calls == 3


def test_paddle_finds_out_itself_why_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def fail(*args: Any) -> socket.socket:
        calls.append(args)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", fail)
    store_wait.wait("no.such.host.invalid", 1)
    assert len(calls) == 1


def test_a_rank_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = ports.free(1)
    monkeypatch.setattr(store_wait, "_LONGEST_S", 0.02)
    store_wait.wait("127.0.0.1", port)


def test_what_is_sent_to_a_store_does_not_wait_for_its_acknowledgement() -> None:
    with ExitStack() as stack:
        server, other = (
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)
        )
        client = stack.enter_context(socket.create_connection(server.getsockname()))
        accepted = stack.enter_context(server.accept()[0])
        store_wait._send_at_once(server.getsockname()[1])
        later = stack.enter_context(socket.create_connection(server.getsockname()))
        accepted_later = stack.enter_context(server.accept()[0])
        ends = (server, client, accepted, accepted_later, other, later)
        sets = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) > 0 for end in ends]
    assert sets == [True, True, True, True, False, False]
