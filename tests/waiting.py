"""The one place where tests wait: for a condition, never for a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


# Limits only end what hangs; on a machine that is busy with other things all takes much longer.
# What is expected at once, and what imports a Paddle and trains.
LONG_S = 120.0
TRAINING_S = 900.0


def until(condition: Callable[[], object], seconds: float = LONG_S) -> None:
    """Return as soon as CONDITION holds; fail after SECONDS."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            message = f"the awaited condition did not come within {seconds} s"
            raise AssertionError(message)
        time.sleep(0.005)
