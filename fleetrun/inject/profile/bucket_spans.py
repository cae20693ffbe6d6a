"""Records when each bucket of gradients is sent, flies, and is waited for.

Our own reducer and communicators are wrapped from outside, so nobody else pays for it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from .. import communicators
from ..dygraph import reducer
from .recorder import FLIGHT, TRAINING, WAIT, now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .recorder import Recorder

# The track of collectives that are no bucket's.
_OTHERS = 1000


def watch(recorder: Recorder) -> None:
    """Wrap the reducer and all algorithms of allreduces."""
    kind: Any = reducer.Reducer
    kind._send = _sending(kind._send, recorder)
    communicator: Any = communicators.Communicator
    communicator.all_reduce = _starting(communicator.all_reduce, recorder)
    for algorithm in vars(communicators).values():
        if isinstance(algorithm, type) and "tasks" in vars(algorithm):
            algorithm.tasks = _flying(algorithm.tasks, recorder)  # type: ignore[attr-defined]


def _sending(send: Callable[..., None], recorder: Recorder) -> Callable[..., None]:
    @functools.wraps(send)
    def _send(own: Any, number: int) -> None:
        bucket = own.buckets[number]
        recorder.label = (f"bucket {number}", number + 1)
        begin = now()
        try:
            send(own, number)
        finally:
            recorder.label = None
        if recorder.is_on:
            size = {"bytes": bucket.nbytes, "gradients": len(bucket.parameters)}
            recorder.add(f"send bucket {number}", TRAINING, begin, details=size, kind="send")
            if bucket.work is not None:
                bucket.work = _Work(bucket.work, f"wait for bucket {number}", recorder)

    return _send


class _Work:
    """A work under way; how long it is waited for is recorded."""

    def __init__(self, work: Any, name: str, recorder: Recorder) -> None:
        self._work = work
        self._name = name
        self._recorder = recorder

    def wait(self) -> None:
        """Wait for the work."""
        begin = now()
        self._work.wait()
        self._recorder.add(self._name, TRAINING, begin, kind=WAIT)


def _starting(all_reduce: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record an allreduce that is done at once as time that was waited for it."""

    @functools.wraps(all_reduce)
    def timed(own: Any, *args: Any, **options: Any) -> Any:
        begin = now()
        work = all_reduce(own, *args, **options)
        if work is None:
            name = recorder.label[0] if recorder.label else "agreement"
            recorder.add(f"wait for {name}", TRAINING, begin, kind=WAIT)
        return work

    return timed


def _flying(tasks: Callable[..., Iterator[Any]], recorder: Recorder) -> Callable[..., Any]:
    """Record the time from the first task of an allreduce to the end of its last.

    On a device that is when its thread has waited for it, as the device's own times are unknown.
    """

    @functools.wraps(tasks)
    def recorded(own: Any, tensor: Any) -> Iterator[Any]:
        name, track = recorder.label or ("agreement", _OTHERS)
        size = {"bytes": int(tensor.size) * int(tensor.element_size())}
        return fly(tasks(own, tensor), name, track, size)

    def fly(steps: Iterator[Any], name: str, track: int, size: dict[str, int]) -> Iterator[Any]:
        begin = now()
        yield from steps
        recorder.add(name, track, begin, details=size, kind=FLIGHT)

    return recorded
