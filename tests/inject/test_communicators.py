"""The threads that run allreduces beside the backward, and how they end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fleetrun.inject.communicators import CommThread, ThreadWork

if TYPE_CHECKING:
    from collections.abc import Iterator


class Task:
    """An allreduce that ends when the peer joins."""

    def __init__(self) -> None:
        self.is_begun = threading.Event()
        self.is_joined = threading.Event()
        self.is_done = False

    def wait(self) -> None:
        """Wait until the peer has joined."""
        self.is_begun.set()
        assert self.is_joined.wait(10)
        self.is_done = True


def alone(task: Task) -> Iterator[Task]:
    yield task


def test_the_work_under_way_is_waited_for_and_no_other_starts() -> None:
    first, second = Task(), Task()
    thread = CommThread()
    for task in (first, second):
        thread.submit(ThreadWork(alone(task)))
    assert first.is_begun.wait(10)
    threading.Timer(0.1, first.is_joined.set).start()
    thread.stop(10)
    assert first.is_done
    assert not second.is_begun.is_set()


def test_an_idle_thread_stops_at_once_and_a_peer_that_never_comes_delays_nobody() -> None:
    CommThread().stop(10)
    task = Task()
    thread = CommThread()
    thread.submit(ThreadWork(alone(task)))
    assert task.is_begun.wait(10)
    thread.stop(0.01)
    assert not task.is_done
    task.is_joined.set()
