"""What the tests of the session's wire share: messages, and a loop that is turned by hand."""

# No `from __future__ import annotations`: the codec reads the annotations of messages.
import time
from collections.abc import Callable
from typing import NamedTuple

from waiting import LONG_S

from fleetrun.run.events import Lines
from fleetrun.run.loop import Loop
from fleetrun.session.codec import Codec


class Part(NamedTuple):
    """A record in a message."""

    name: str
    weight: float = 0.0


class Hello(NamedTuple):
    """A message with a field of every kind."""

    host: str
    rank: int | None = None
    ports: tuple[int, ...] = ()
    pair: tuple[str, int] = ("", 0)
    parts: tuple[Part, ...] = ()
    is_final: bool = False
    lines: Lines = ""


class End(NamedTuple):
    """A message that says which of its values mean something."""

    code: int

    def check(self) -> None:
        """Allow what a process can end with."""
        if not 0 <= self.code <= 255:
            raise ValueError("an exit code that no process has")


CODEC = Codec(Hello, End)


def turn_until(loop: Loop, condition: Callable[[], object]) -> None:
    """Turn LOOP until CONDITION holds."""
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "what was awaited did not come"
        # So that a turn ends even if nothing happens.
        loop.timer("the test looks again", time.monotonic() + 0.01, lambda: None)
        loop.turn()
