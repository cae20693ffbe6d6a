"""Two launchers of a session on one loop, over real connections."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from launchers import CONFIG, HERE, Launchers
from wire import turn_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def launchers() -> Iterator[Launchers]:
    """Launchers that are closed after the test."""
    made = Launchers()
    yield made
    made.close()


def test_who_calls_a_port_that_becomes_free_coordinates_the_job(launchers: Launchers) -> None:
    # The kernel, or a child, may still hold the port of a killed launcher.
    with socket.create_server((HERE, launchers.port)) as held:
        first, rank, _ = launchers.take_part("first", serves=True)
        _, other, _ = launchers.take_part("second")
        assert not first.serves
        held.accept()[0].close()
    turn_until(launchers.loop, lambda: rank.rosters and other.rosters)
    assert first.serves


def test_who_may_coordinate_does_when_the_coordinator_has_ended_before_the_start(
    launchers: Launchers,
) -> None:
    gone, _, _ = launchers.take_part("gone", serves=True, config=CONFIG._replace(least=3, most=3))
    first, rank, _ = launchers.take_part("first", serves=True)
    turn_until(launchers.loop, lambda: first.is_connected)
    gone.close()
    launchers.take_part("second")
    turn_until(launchers.loop, lambda: rank.rosters)
    assert first.serves
