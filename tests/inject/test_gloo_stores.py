"""The port at which the ranks of a gloo group meet."""

from __future__ import annotations

import socket

import ports
import pytest

from fleetrun.inject.gloo_stores import held_end


def listen(port: int, *, reuse: bool) -> socket.socket:
    """Return a socket that listens at PORT; with REUSE, as Paddle's store does."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    try:
        server.bind(("", port))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def test_the_planned_port_is_held_for_a_store_and_for_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (planned,) = ports.free(1)
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", f"127.0.0.1:{planned}")
    with held_end() as end:
        assert end == ("127.0.0.1", planned)
        with pytest.raises(OSError, match="in use"):
            listen(planned, reuse=False)
        with listen(planned, reuse=True):
            pass


def test_another_port_is_taken_where_the_script_listens_at_the_planned_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (planned,) = ports.free(1)
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", f"127.0.0.1:{planned}")
    with listen(planned, reuse=True), held_end() as (_, port):
        assert port != planned
