"""The loop: descriptors before timers."""

from __future__ import annotations

import os
import time

from fleetrun.run.loop import Loop


def test_what_happened_before_a_timer_elapsed_is_handled_before_it() -> None:
    loop, called = Loop(), list[str]()
    (busy, busy_end), (late, late_end) = os.pipe(), os.pipe()
    due = time.monotonic() + 0.05
    try:

        def take_long() -> None:
            os.read(busy, 1)
            os.write(late_end, b".")
            while time.monotonic() < due:
                pass

        def on_late() -> None:
            os.read(late, 1)
            called.append("late")

        loop.watch(busy, take_long)
        loop.watch(late, on_late)
        loop.timer("due", due, lambda: called.append("timer"))
        os.write(busy_end, b".")
        for _ in range(2):
            loop.turn()
        assert called == ["late", "timer"]
    finally:
        for fd in (busy, busy_end, late, late_end):
            os.close(fd)
        loop.close()
