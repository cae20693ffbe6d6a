"""The stages of an allreduce: they overlap in threads or on the device, and they end."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from fleetrun.inject.allreduce_stages import DeviceStages, ThreadStages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
