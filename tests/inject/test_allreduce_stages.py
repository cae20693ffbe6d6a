"""The stages of an allreduce: they overlap in threads or on the device, and they end."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from fleetrun.inject.allreduce_stages import DeviceStages, ThreadStages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fleetrun.inject.allreduce_stages import Stage


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


def itself(task: Task) -> Task:
    return task


def test_the_work_under_way_is_waited_for_and_no_other_starts() -> None:
    first, second = Task(), Task()
    threads = ThreadStages([itself])
    for task in (first, second):
        threads.submit(task)
    assert first.is_begun.wait(10)
    threading.Timer(0.1, first.is_joined.set).start()
    threads.stop(10)
    assert first.is_done
    assert not second.is_begun.is_set()


def test_an_idle_thread_stops_at_once_and_a_peer_that_never_comes_delays_nobody() -> None:
    ThreadStages([itself]).stop(10)
    task = Task()
    threads = ThreadStages([itself])
    threads.submit(task)
    assert task.is_begun.wait(10)
    threads.stop(0.01)
    assert not task.is_done
    task.is_joined.set()


def test_a_tensor_is_in_its_second_stage_while_the_next_one_is_in_its_first() -> None:
    tasks = {(stage, tensor): Task() for stage in "ab" for tensor in (1, 2)}

    def begins(stage: str) -> Stage:
        return lambda tensor: tasks[stage, tensor]

    threads = ThreadStages([begins("a"), begins("b")])
    works = [threads.submit(1), threads.submit(2)]
    tasks["a", 1].is_joined.set()
    for place in (("a", 2), ("b", 1)):
        assert tasks[place].is_begun.wait(10)
    # Although the next tensor has finished its first stage, this one is first in the second.
    tasks["a", 2].is_joined.set()
    assert not tasks["b", 2].is_begun.is_set()
    for task in tasks.values():
        task.is_joined.set()
    for work in works:
        work.wait()
    threads.stop(1)


def test_a_stage_that_fails_is_the_last_of_its_tensor_and_not_of_others() -> None:
    seen = []

    def fails_once(tensor: int) -> Task:
        if tensor == 1:
            raise ValueError(tensor)
        return done()

    def second(tensor: int) -> Task:
        seen.append(tensor)
        return done()

    def done() -> Task:
        task = Task()
        task.is_joined.set()
        return task

    threads = ThreadStages([fails_once, second])
    works = [threads.submit(1), threads.submit(2)]
    with pytest.raises(ValueError, match="1"):
        works[0].wait()
    works[1].wait()
    assert seen == [2]
    threads.stop(1)


class Device:
    """Notes each call and its stream; the host never waits."""

    def __init__(self) -> None:
        self.issued: list[tuple[str, str]] = []
        self.stream = "computation"
        self._streams = iter(("second", "third"))

    def stage(self, name: str) -> Callable[[Any], Any]:
        """Return a stage that is noted as NAME."""

        def begin(tensor: int) -> DeviceTask:
            self.issued.append((self.stream, f"{name} {tensor}"))
            return DeviceTask(self, f"{name} {tensor}")

        return begin

    def new_stream(self) -> str:
        """Return a stream's name."""
        return next(self._streams)

    @contextlib.contextmanager
    def entered(self, stream: str) -> Iterator[None]:
        """Make STREAM the current one."""
        before, self.stream = self.stream, stream
        yield
        self.stream = before


class DeviceTask:
    """A collective on the device, for which the current stream can wait."""

    def __init__(self, device: Device, name: str) -> None:
        self._device, self._name = device, name

    def wait(self) -> None:
        """Make the current stream wait."""
        self._device.issued.append((self._device.stream, f"waits for {self._name}"))


def test_a_device_is_given_all_stages_at_once_and_the_computation_waits_for_the_last_only() -> None:
    device = Device()
    stages = [device.stage(name) for name in ("reduce", "sum", "broadcast")]
    beside = DeviceStages(stages, device.new_stream, device.entered)
    works = [beside.submit(1), beside.submit(2)]
    issued = [
        [
            ("computation", f"reduce {tensor}"),
            ("second", f"waits for reduce {tensor}"),
            ("second", f"sum {tensor}"),
            ("third", f"waits for sum {tensor}"),
            ("third", f"broadcast {tensor}"),
        ]
        for tensor in (1, 2)
    ]
    assert device.issued == [*issued[0], *issued[1]]
    works[0].wait()
    assert device.issued[-1] == ("computation", "waits for broadcast 1")
