"""The one place where tests wait: for a condition, never for a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Return as soon as CONDITION holds; fail after SECONDS."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            message = f"the awaited condition did not come within {seconds} s"
            raise AssertionError(message)
        time.sleep(0.005)
