"""The one place where tests wait: for a condition, never for a time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


# Limits only end what hangs; on a machine that is busy with other things all takes much longer.
# What is expected at once, and what imports a Paddle and trains.
LONG_S = 120.0
TRAINING_S = 900.0
# However slow a machine is, whoever is lost on purpose must be missed before a test gives up.
_LONGEST_SILENCE_S = 60.0


def until(condition: Callable[[], object], seconds: float = LONG_S) -> None:
    """Return as soon as CONDITION holds; fail after SECONDS."""
    looks_s = time.monotonic()
    deadline = looks_s + seconds
    while not condition():
        now_s = time.monotonic()
        if now_s > deadline:
            raise AssertionError(f"the awaited condition did not come within {seconds} s")
        # What starts processes to look would take a processor from what it waits for.
        time.sleep(min(max(0.005, 3 * (now_s - looks_s)), 0.5))
        looks_s = time.monotonic()


def patient(seconds: float) -> float:
    """Return SECONDS of an idle machine as this one needs them now: whoever waits counts.

    For what a test gives to launchers: a heartbeat or a rendezvous that is starved is no fault.
    """
    load, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    waiting = max(float(load), float(running.partition("/")[0]))
    # Who sleeps most of the time, as a launcher does, gets a processor before those that never do.
    slower = max(1.0, waiting / (os.cpu_count() or 1) / 2)
    return max(seconds, min(seconds * slower, _LONGEST_SILENCE_S))


# For a job that says no other: no host of it is lost because it waits for a processor.
HEARTBEAT = f"--heartbeat_timeout={_LONGEST_SILENCE_S:g}"


def quick(heartbeat_s: float = 4.0) -> tuple[str, str]:
    """Return the options of a job that misses a lost host soon, but not one that waits its turn."""
    return f"--heartbeat_timeout={patient(heartbeat_s):.1f}", "--grace=1"
