"""A killed child is left behind only if it does not end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from fleetrun.run.isolation import CallResult, IsolatedCall
from fleetrun.run.loop import Loop

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one processor is kept busy"
)
# Less than the kernel lets a real-time process run at a time, more than the end of a child takes.
BUSY_S = 0.5


@contextmanager
def starved() -> Iterator[IsolatedCall]:
    """Give a call whose child gets no processor for a while."""
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
        if not os.read(reader, 1):
            call.abandon()
            pytest.skip("this needs the right to run before all others")
        yield call
    finally:
        os.close(reader)
        os.waitpid(busy, 0)


def is_there(call: IsolatedCall) -> bool:
    return os.path.exists(f"/proc/{call.pid}")


def test_a_child_that_has_to_wait_for_a_processor_is_not_left_behind() -> None:
    with starved() as call:
        left = call.abandon()
        assert not call.is_left, left
        assert not is_there(call)


def test_who_did_not_answer_is_told_when_the_child_has_ended() -> None:
    loop = Loop()
    results: list[CallResult] = []
    call = IsolatedCall(signal.pause)
    call.watch(loop, results.append, 0.0, callee="the driver")
    while not results:
        loop.turn()
    assert not is_there(call)
    assert results[0].is_late
    assert results[0].trouble.startswith("the driver has not answered within 0 s (process ")
    loop.close()
