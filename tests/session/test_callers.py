"""Callers that know the key of the job, but do not send what a launcher sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from wire import turn_until

from fleetrun.session.callers import Callers
from fleetrun.session.messages import PROTOCOL, Heartbeat, Join, JoinRequest, Start

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetrun.run.loop import Loop
    from fleetrun.session.connection import Connection
    from fleetrun.session.exchange import FromMember as Exchanged
    from fleetrun.session.messages import FromMember

JOIN = Join(PROTOCOL, "launcher", 0, JoinRequest("", "node-2", 7, (), ()))


class Caller:
    """A fake connection that remembers whether it is closed."""

    def __init__(self, address: str = "10.0.0.2") -> None:
        self.address = address
        self.is_closed = False
        self.heard: Callable[[tuple[object, ...]], None]
        self.lost: Callable[[str], None]

    def close(self) -> None:
        """Close it."""
        self.is_closed = True

    def lose(self, why: str) -> None:
        """Close it, and tell its owner."""
        self.close()
        self.lost(why)


def callers(loop: Loop, **limits: float) -> tuple[Callers, list[FromMember | Exchanged], list[int]]:
    """Make the callers of a coordinator, their messages, and the list of those gone."""
    received: list[FromMember | Exchanged] = []
    lost: list[int] = []
    made = Callers(
        loop,
        received=lambda _number, _caller, message: received.append(message),
        lost=lost.append,
        join_s=limits.get("join_s", 60.0),
        most_pending=int(limits.get("most_pending", 10)),
    )
    return made, received, lost


def call(made: Callers, address: str = "10.0.0.2") -> Caller:
    """Let somebody call."""
    caller = Caller(address)
    made.take(cast("Connection", caller))
    return caller


def test_who_never_joins_is_closed_and_who_has_joined_stays(loop: Loop) -> None:
    made, _, lost = callers(loop, join_s=0.02)
    joined, silent = call(made), call(made)
    joined.heard(JOIN)
    turn_until(loop, lambda: lost)
    assert (lost, silent.is_closed, joined.is_closed) == ([2], True, False)
    made.close()
    assert joined.is_closed


def test_whatever_else_is_said_does_not_count_as_joining(loop: Loop) -> None:
    made, received, lost = callers(loop, join_s=0.02)
    call(made).heard(Heartbeat(1))
    turn_until(loop, lambda: lost)
    assert received == [Heartbeat(1)]
    call(made).heard(Start(0))
    assert (lost, received) == ([1, 2], [Heartbeat(1)])


def test_a_flood_of_callers_that_never_join_drives_out_itself(loop: Loop) -> None:
    made, _, _ = callers(loop, most_pending=3)
    launcher = call(made)
    flood = [call(made, "10.0.0.9") for _ in range(20)]
    assert not launcher.is_closed
    assert [caller.is_closed for caller in flood] == [True] * 18 + [False] * 2
    made.close()
