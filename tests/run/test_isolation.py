"""A child that was killed is left behind only if it does not end."""

from __future__ import annotations

import os
import signal
import time

import pytest

from fleetrun.run.isolation import IsolatedCall

# Less than the kernel lets a real-time process run at a time, more than the end of a child takes.
BUSY_S = 0.5


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor is kept busy")
def test_a_child_that_has_to_wait_for_a_processor_is_not_left_behind() -> None:
    cpu = max(os.sched_getaffinity(0))

    def wait_there() -> None:
        os.sched_setaffinity(0, {cpu})
        signal.pause()

    call = IsolatedCall(wait_there)
    reader, writer = os.pipe()
    busy = os.fork()
    if not busy:
        try:
            os.sched_setaffinity(0, {cpu})
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            os.write(writer, b".")
            until = time.monotonic() + BUSY_S
            while time.monotonic() < until:
                pass
        finally:
            os._exit(0)
    os.close(writer)
    try:
        may_keep_it = os.read(reader, 1)
        said = call.abandon()
    finally:
        os.close(reader)
        os.waitpid(busy, 0)
    if not may_keep_it:
        pytest.skip("this needs the right to run before all others")
    assert not call.is_left, said
