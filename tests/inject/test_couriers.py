"""The threads that make allreduces beside the backward, and how they end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fleetrun.inject.dygraph.communicators import Courier, Errand

if TYPE_CHECKING:
    from collections.abc import Iterator


class Task:
    """An allreduce that lasts until the peer comes."""

    def __init__(self) -> None:
        self.is_begun = threading.Event()
        self.is_met = threading.Event()
        self.is_done = False

    def wait(self) -> None:
        """Wait for the peer."""
        self.is_begun.set()
        assert self.is_met.wait(10)
        self.is_done = True


def alone(task: Task) -> Iterator[Task]:
    yield task


def test_the_errand_under_way_is_waited_for_and_no_other_begins() -> None:
    first, second = Task(), Task()
    courier = Courier()
    for task in (first, second):
        courier.send(Errand(alone(task)))
    assert first.is_begun.wait(10)
    threading.Timer(0.1, first.is_met.set).start()
    courier.leave(10)
    assert first.is_done
    assert not second.is_begun.is_set()


def test_an_idle_courier_leaves_at_once_and_a_peer_that_never_comes_holds_nobody() -> None:
    Courier().leave(10)
    task = Task()
    courier = Courier()
    courier.send(Errand(alone(task)))
    assert task.is_begun.wait(10)
    courier.leave(0.01)
    assert not task.is_done
    task.is_met.set()
