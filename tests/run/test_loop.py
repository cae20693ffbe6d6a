"""Shares of the loop: registrations move with them."""

from __future__ import annotations

import os
import time
from functools import partial

from fleetrun.run.loop import Loop


def test_what_is_removed_or_replaced_in_a_turn_is_not_called_in_it() -> None:
    loop, called = Loop(), list[int]()
    pipes = [os.pipe() for _ in range(3)]
    (first, _), (second, _), (third, _) = pipes
    try:

        def on_first() -> None:
            assert list(loop.ready) == [first, second, third]
            called.append(first)
            loop.unwatch(second)
            # Its number may be that of a new descriptor, about which nothing is known.
            loop.watch(third, lambda: called.append(-third))
            assert list(loop.ready) == [first]

        loop.watch(first, on_first)
        for fd in (second, third):
            loop.watch(fd, partial(called.append, fd))
        for _, fd in pipes:
            os.write(fd, b".")
        loop.turn()
        assert called == [first]
        loop.unwatch(first)
        loop.turn()
        assert called == [first, -third]
    finally:
        for fd in sum(pipes, ()):
            os.close(fd)
        loop.close()


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
