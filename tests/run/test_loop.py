"""Shares of the loop: registrations move with them."""

from __future__ import annotations

import os
import time

from fleetrun.run.loop import Loop, LoopShare


def test_a_share_takes_descriptors_and_timers_along() -> None:
    first, second = Loop(), Loop()
    share, seen = LoopShare(None), list[str]()
    read_fd, write_fd = os.pipe()
    try:
        share.watch(read_fd, lambda: seen.append("fd"))
        share.timer("due", time.monotonic() + 0.05, lambda: seen.append("timer"))
        share.timer("gone", time.monotonic(), lambda: seen.append("gone"))
        share.timer("gone", None, lambda: None)
        share.move(first)
        share.move(second)
        os.write(write_fd, b".")
        first.timer("turn", time.monotonic() + 0.1, lambda: None)
        first.turn()
        assert seen == []
        second.turn()
        assert seen == ["fd", "timer"]
        share.clear()
        second.timer("turn", time.monotonic(), lambda: None)
        second.turn()
        assert seen == ["fd", "timer"]
    finally:
        for fd in (read_fd, write_fd):
            os.close(fd)
        first.close()
        second.close()
